"""Stand-in for `sgl_kernel`, because PyPI has no CPU build of it. It can only be imported, except
for the functions of Qwen3.5 and of speculative decoding.

SGLang imports names from it unconditionally. On a CPU without AMX, every layer of the Qwen-VL
models then takes its plain torch path. So any name can be imported here, and calling one raises.
The layers of Qwen3.5 have no such path; `gated_delta_net` has the functions that they call.
`torch.ops.sgl_kernel` gets exactly the names that SGLang's modules look up when they are imported,
but not the names by whose presence SGLang detects the real kernels (`convert_weight_packed`,
`fused_qk_norm_cpu`, `fused_qk_norm_rope_cpu`).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

LOOKED_UP_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


def missing(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError with `name`."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this is the CPU stand-in")

    return call


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)


for _name in LOOKED_UP_AT_IMPORT:
    if not hasattr(torch.ops.sgl_kernel, _name):
        torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> Tensor")

from .draft_chains import (  # noqa: E402, F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)
from .gated_delta_net import install  # noqa: E402  # after the names that it replaces

install()

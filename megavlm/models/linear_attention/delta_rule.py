"""Convolution and gated delta rule of Gated DeltaNet over packs of trees.

Each segment is computed once, however many segments continue it. All segments of one depth are one
call of a variable-length kernel; its initial states are final states of the previous depth.
"""

import importlib.util
from collections.abc import Callable
from importlib import metadata

import torch
from packaging.version import Version
from torch import Tensor

from megavlm.models.linear_attention.chunked_rule import chunk_gated_delta_rule
from megavlm.models.linear_attention.tree_scan import TreeScan
from megavlm.parallel import platform

# flash-linear-attention's chunk_gated_delta_rule, or a function with its arguments
# (`chunked_rule`).
Rule = Callable[..., tuple[Tensor, Tensor | None]]


def choose_rule() -> Rule:
    """Return the delta rule for this machine: flash-linear-attention's kernel on a GPU, PyTorch
    operations on a CPU. Raises ValueError if there is a GPU and the kernel is not installed.
    """
    if not platform.has_gpu():
        return chunk_gated_delta_rule
    if not importlib.util.find_spec("fla"):
        raise ValueError(
            "the linear attention layers of this model need flash-linear-attention on a GPU: "
            "install megavlm[linear-attention] (fla-core)."
        )
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_rule

    rule: Rule = fla_rule
    return rule


def backward_refusal() -> str | None:
    """Return why flash-linear-attention's kernel would refuse the backward pass on this machine,
    and what to do; None if it would not.
    """
    # The only refusal on this path in fla-core 0.6.0: chunk_bwd_dqkwg of fla/ops/common/chunk_o.py.
    installed = _installed("triton")
    if not platform.is_hopper() or installed is None or _installed("tilelang") is not None:
        return None
    if not Version("3.4.0") <= Version(installed) < Version("3.7.1"):
        return None
    return (
        f"flash-linear-attention refuses the backward pass with Triton {installed} on a Hopper "
        "GPU, because Triton from 3.4.0 to before 3.7.1 computes wrong gradients there: pip "
        "install tilelang, or a PyTorch with Triton 3.7.1 or later"
    )


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tree_convolution(x: Tensor, weight: Tensor, scan: TreeScan) -> Tensor:
    """Convolve each channel along each token's path, causally and without bias.

    x: [T, C]
    weight: [C, W]. The last column is multiplied with the token itself.

    Returns [T, C].
    """
    padded = torch.cat([x, x.new_zeros(1, x.size(1))])  # the last row stands for no token
    output = x * weight[:, -1]
    for tap, index in enumerate(scan.taps, start=2):
        output = torch.addcmul(output, padded.index_select(0, index), weight[:, -tap])
    return output


def tree_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scan: TreeScan,
    rule: Rule,
) -> Tensor:
    """Run the gated delta rule along each token's path.

    query, key: [T, key heads, K]. The rule normalises them.
    value: [T, heads, V]
    decay: [T, heads] Log decay.
    beta: [T, heads]

    Returns [T, heads, V].
    """
    inputs: tuple[Tensor, ...] = (query, key, value, decay, beta)
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for level in scan.levels:
        mine = inputs
        if level.token_index is not None:
            mine = tuple(x.index_select(0, level.token_index) for x in inputs)
        initial = None
        if level.parents is not None and states is not None:
            initial = states.index_select(0, level.parents)
        output, states = rule(
            *(x.unsqueeze(0) for x in mine),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=level.bounds,
            cu_seqlens_cpu=level.host_bounds,
        )
        outputs.append(output.squeeze(0))
    if scan.order is None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, scan.order)

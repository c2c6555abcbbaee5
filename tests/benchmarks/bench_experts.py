"""Time of a token's way to its experts and back: megavlm's fixed order against megatron-core's
atomic additions, forward and backward, in one run.
"""

import time
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megavlm.models.common import expert_sums
from megavlm.parallel import platform


def seconds(module: Any, tokens: torch.Tensor, chosen: torch.Tensor) -> float:
    """Return the least time of one layer in seconds."""
    found = []
    for _ in range(8):
        leaf = tokens.detach().requires_grad_()
        platform.synchronize()
        start = time.perf_counter()
        copies, _, index = module.permute(leaf, chosen)
        module.unpermute(copies, index, leaf.shape).backward(tokens)
        platform.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1024, 2048), (4096, 2048)])
def bench_order_of_experts(num_tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """8 of 128 experts, as in Qwen3-VL-30B-A3B."""
    device = platform.device()
    tokens = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
    best = torch.rand(num_tokens, 128, device=device).topk(8).indices
    chosen = torch.zeros(num_tokens, 128, dtype=torch.bool, device=device).scatter(1, best, True)
    theirs, ours = (seconds(module, tokens, chosen) for module in (moe_utils, expert_sums))
    print(
        f"\n{num_tokens} tokens of {hidden} in {dtype}: {ours * 1e3:.1f} ms in order, "
        f"{theirs * 1e3:.1f} ms by additions, ratio {ours / theirs:.2f}"
    )

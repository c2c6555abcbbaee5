"""Attention over sequences of variable length, for the language model and the towers."""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def cumulative_bounds(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the first index of each of B runs, followed by their total length: [B + 1] int32."""
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=device)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Run PyTorch's flash attention over B sequences of variable length. Only on a GPU, and not in
    float32.

    query: [t, heads, D]
    key, value: [T, kv heads, D]
    query_bounds, key_bounds: [B + 1] int32, the first index of each sequence, then t or T.
    """
    from torch.nn.attention import varlen

    # torch 2.12 added the argument; earlier versions accept fewer key heads without it.
    parameters = inspect.signature(varlen.varlen_attn).parameters
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    output = varlen.varlen_attn(
        query,
        key,
        value,
        query_bounds,
        key_bounds,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        **grouped,
    )
    assert isinstance(output, Tensor)  # it would be a tuple if log-sum-exps were requested
    return output

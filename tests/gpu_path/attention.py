"""PyTorch's variable-length flash attention, a CUDA kernel, by its dot-product attention."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> Tensor:
    """Attend within each sequence; causal ones align the last query with the last key."""
    assert query.dtype != torch.float32, "the kernel takes half precision only"
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    bounds: list[Any] = [x.tolist() for x in (query_bounds, key_bounds)]
    queries, keys = ([b - a for a, b in pairwise(x)] for x in bounds)
    assert (max(queries), max(keys)) == (max_queries, max_keys)
    parts = (query.split(queries), key.split(keys), value.split(keys))
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        mask = None
        if window_size == (-1, 0):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)

"""Orders of rows in the fused input linears of Gated DeltaNet and of gated attention, as functions
of tensors whose first dim is rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def group_rows(groups: int, channels: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Join [q; k; v], of so many `channels`, and other tensors by key head, of which there are
    `groups`: of each tensor the rows of the first head, then of each those of the second.
    """
    parts = [*tensors[0].split(list(channels)), *tensors[1:]]
    return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], dim=1).flatten(0, 1)


def ungroup_rows(groups: int, rows: Sequence[int], fused: Tensor) -> tuple[Tensor, ...]:
    """Undo `group_rows`. `rows`: of q, k, v and each of the other tensors."""
    parts = fused.unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
    q, k, v, *others = (x.flatten(0, 1) for x in parts)
    return (torch.cat([q, k, v]), *others)


def join_gated(groups: int, size: int, tensors: Sequence[Tensor]) -> Tensor:
    """Join q, with each head's query above its gate, k and v by key-value head, of which there are
    `groups`: all queries, all gates, key and value of the first, then of the second. `size`: of a
    head.
    """
    query, key, value = (x.unflatten(0, (groups, -1)) for x in tensors)
    query = query.unflatten(1, (-1, 2, size)).transpose(1, 2).flatten(1, 3)
    return torch.cat([query, key, value], dim=1).flatten(0, 1)


def split_gated(groups: int, size: int, fused: Tensor) -> tuple[Tensor, ...]:
    """Undo `join_gated`."""
    rows = fused.unflatten(0, (groups, -1))
    query, key, value = rows.split([rows.size(1) - 2 * size, size, size], dim=1)
    query = query.unflatten(1, (2, -1, size)).transpose(1, 2).flatten(1, 3)
    return tuple(x.flatten(0, 1) for x in (query, key, value))

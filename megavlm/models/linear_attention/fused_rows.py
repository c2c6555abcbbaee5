"""Row orders of the fused input layers of Gated DeltaNet and of gated attention, as functions on
tensors whose first dim is rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def group_rows(groups: int, channels: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Join [q; k; v] and other tensors by key head: first each tensor's rows of the first head,
    then each tensor's rows of the second head, and so on.

    groups: Number of key heads.
    channels: Number of rows of q, k and v.
    tensors: [q; k; v] as one tensor, then the other tensors, each [rows, ...].

    Example, two heads with a row each of q, k, v and z: [q0 q1 k0 k1 v0 v1], [z0 z1] become
    [q0 k0 v0 z0 q1 k1 v1 z1].
    """
    parts = [*tensors[0].split(list(channels)), *tensors[1:]]
    return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], dim=1).flatten(0, 1)


def ungroup_rows(groups: int, rows: Sequence[int], fused: Tensor) -> tuple[Tensor, ...]:
    """Undo `group_rows`. Returns [q; k; v] and the other tensors, each [its rows, ...].

    rows: Number of rows of q, k, v and each of the other tensors.
    """
    parts = fused.unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
    q, k, v, *others = (x.flatten(0, 1) for x in parts)
    return (torch.cat([q, k, v]), *others)


def join_gated(groups: int, size: int, tensors: Sequence[Tensor]) -> Tensor:
    """Join q, k and v by key-value head: all queries, all gates, the key and the value of the first
    key-value head, then of the second, and so on.

    groups: Number of key-value heads.
    size: Size of a head.
    tensors: q, k and v. In q the rows of each head's query are followed by the rows of its gate.
    """
    query, key, value = (x.unflatten(0, (groups, -1)) for x in tensors)
    query = query.unflatten(1, (-1, 2, size)).transpose(1, 2).flatten(1, 3)
    return torch.cat([query, key, value], dim=1).flatten(0, 1)


def split_gated(groups: int, size: int, fused: Tensor) -> tuple[Tensor, ...]:
    """Undo `join_gated`. Returns q with its gates, k and v, each [its rows, ...]."""
    rows = fused.unflatten(0, (groups, -1))
    query, key, value = rows.split([rows.size(1) - 2 * size, size, size], dim=1)
    query = query.unflatten(1, (2, -1, size)).transpose(1, 2).flatten(1, 3)
    return tuple(x.flatten(0, 1) for x in (query, key, value))

"""Full HF tensors on one rank from the shards of a tensor-parallel group."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.models.common.mapping import unshard
from megavlm.rollout.weights.plan import Item

NamedTensors = list[tuple[str, Tensor]]


def gather(items: Sequence[Item], group: dist.ProcessGroup, dtype: torch.dtype) -> NamedTensors:
    """HF names and tensors, in `dtype`, on the group's first rank; empty on the others.

    Collective over the group: one gather of everything that is cut, flattened. What every rank
    holds anyway does not travel.
    """
    cut = [shard for entry, shard in items if entry.shard.dim is not None]
    flat = torch.cat([shard.to(dtype).flatten() for shard in cut]) if cut else None
    ranks = _gather_flat(flat, group) if flat is not None else []
    if group.rank() != 0:
        return []
    sizes = [shard.numel() for shard in cut]
    pieces = zip(*(rank.split(sizes) for rank in ranks), strict=True)
    tensors: NamedTensors = []
    for entry, shard in items:
        if entry.shard.dim is None:
            full = shard.to(dtype)
        else:
            full = unshard(entry, [piece.view(shard.shape) for piece in next(pieces)])
        tensors += zip(entry.hf, entry.to_hf(full), strict=True)
    return tensors


def _gather_flat(flat: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [flat]
    ranks = [torch.empty_like(flat) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(flat, ranks, group=group, group_dst=0)
    return ranks or []

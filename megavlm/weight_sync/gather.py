"""Full HF tensors on one rank from the shards of the ranks that hold them."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.models.common.mapping import Entry, unshard
from megavlm.parallel import platform
from megavlm.weight_sync.plan import Plan
from megavlm.weight_sync.shards import Shard

NamedTensors = list[tuple[str, Tensor]]


def gather(
    plan: Plan, indices: Sequence[int], shards: Mapping[int, Shard], dtype: torch.dtype, *, to: int
) -> NamedTensors:
    """HF names and tensors of some entries, in `dtype`, on rank `to`; empty on the others.

    Point to point: `to` and the ranks that give something call it, for others it does nothing. A
    rank sends what it gives as one flat tensor.
    """
    rank = dist.get_rank()
    given = {i: shards[i]().to(dtype) for i in indices if rank in plan.source_ranks[i]}
    if rank != to:
        if given:
            dist.send(torch.cat([shard.flatten() for shard in given.values()]), to)
        return []
    pieces = {to: given}
    for source_rank in sorted({r for i in indices for r in plan.source_ranks[i]} - {to}):
        pieces[source_rank] = _receive(
            plan, [i for i in indices if source_rank in plan.source_ranks[i]], source_rank, dtype
        )
    tensors: NamedTensors = []
    for _, group in groupby(indices, key=lambda index: plan.entries[index].hf):
        handles = [(plan.entries[i], _full(plan, i, pieces)) for i in group]
        tensors += to_hf(handles)
    return tensors


def _full(plan: Plan, index: int, pieces: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
    return unshard(
        plan.entries[index],
        [pieces[source_rank][index] for source_rank in plan.source_ranks[index]],
    )


def to_hf(handles: Sequence[tuple[Entry, Tensor]]) -> NamedTensors:
    """HF names and tensors of one entry and its full Megatron tensor, or of all experts' entries of
    one stack, in order.
    """
    entry, full = handles[0]
    if entry.expert is None:
        return list(zip(entry.hf, entry.to_hf(full), strict=True))
    rows = zip(*(entry.to_hf(full) for entry, full in handles), strict=True)
    return [(name, torch.stack(row)) for name, row in zip(entry.hf, rows, strict=True)]


def _receive(
    plan: Plan, indices: Sequence[int], source_rank: int, dtype: torch.dtype
) -> dict[int, Tensor]:
    shapes = []
    for index in indices:
        entry, parts = plan.entries[index], len(plan.source_ranks[index])
        shape = list(entry.megatron_shape)
        if entry.shard.dim is not None:
            shape[entry.shard.dim] //= parts
        shapes.append(torch.Size(shape))
    flat = torch.empty(sum(s.numel() for s in shapes), dtype=dtype, device=platform.device())
    dist.recv(flat, source_rank)
    pieces = flat.split([shape.numel() for shape in shapes])
    return {i: piece.view(s) for i, piece, s in zip(indices, pieces, shapes, strict=True)}

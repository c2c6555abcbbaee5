"""Full HF tensors on one rank from the shards of the ranks that hold them."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.models.common.mapping import Entry, unshard
from megavlm.parallel import platform
from megavlm.rollout.weights.plan import Plan
from megavlm.rollout.weights.shards import Shard

NamedTensors = list[tuple[str, Tensor]]


def gather(
    plan: Plan, indices: Sequence[int], shards: Mapping[int, Shard], dtype: torch.dtype, *, to: int
) -> NamedTensors:
    """HF names and tensors of some entries, in `dtype`, on rank `to`; empty on the others.

    Point to point: `to` and the ranks that give something call it, for others it does nothing. A
    rank sends what it gives as one flat tensor.
    """
    rank = dist.get_rank()
    given = {i: shards[i]().to(dtype) for i in indices if rank in plan.givers[i]}
    if rank != to:
        if given:
            dist.send(torch.cat([shard.flatten() for shard in given.values()]), to)
        return []
    pieces = {to: given}
    for giver in sorted({r for i in indices for r in plan.givers[i]} - {to}):
        pieces[giver] = _receive(
            plan, [i for i in indices if giver in plan.givers[i]], giver, dtype
        )
    tensors: NamedTensors = []
    for _, group in groupby(indices, key=lambda index: plan.entries[index].hf):
        members = [(plan.entries[i], _full(plan, i, pieces)) for i in group]
        tensors += to_hf(members)
    return tensors


def _full(plan: Plan, index: int, pieces: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
    return unshard(plan.entries[index], [pieces[giver][index] for giver in plan.givers[index]])


def to_hf(members: Sequence[tuple[Entry, Tensor]]) -> NamedTensors:
    """HF names and tensors of one entry and its full Megatron tensor, or of all experts' entries of
    one stack, in order.
    """
    entry, full = members[0]
    if entry.expert is None:
        return list(zip(entry.hf, entry.to_hf(full), strict=True))
    rows = zip(*(entry.to_hf(full) for entry, full in members), strict=True)
    return [(name, torch.stack(row)) for name, row in zip(entry.hf, rows, strict=True)]


def _receive(
    plan: Plan, indices: Sequence[int], giver: int, dtype: torch.dtype
) -> dict[int, Tensor]:
    shapes = []
    for index in indices:
        entry, parts = plan.entries[index], len(plan.givers[index])
        shape = list(entry.megatron_shape)
        if entry.shard.dim is not None:
            shape[entry.shard.dim] //= parts
        shapes.append(torch.Size(shape))
    flat = torch.empty(sum(s.numel() for s in shapes), dtype=dtype, device=platform.device())
    dist.recv(flat, giver)
    pieces = flat.split([shape.numel() for shape in shapes])
    return {i: piece.view(s) for i, piece, s in zip(indices, pieces, shapes, strict=True)}

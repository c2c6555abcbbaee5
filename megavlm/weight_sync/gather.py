"""Gathering of full HF tensors on one rank, from the shards of the ranks that hold them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.models.common.loading import local_tensors
from megavlm.models.common.lora import adapters
from megavlm.models.common.mapping import Entry, unshard
from megavlm.parallel import platform
from megavlm.weight_sync.ownership import TIED, SyncPlan
from megavlm.weight_sync.sglang_layout import piece_name

NamedTensors = list[tuple[str, Tensor]]
LocalShard = Callable[[], Tensor]  # returns this rank's current shard of a Megatron tensor


def gather(
    plan: SyncPlan,
    indices: Sequence[int],
    shards: Mapping[int, LocalShard],
    dtype: torch.dtype,
    *,
    to: int,
) -> NamedTensors:
    """Gather the HF names and tensors of some mapping entries on rank `to`. Tensors are in `dtype`
    or the entry's own dtype. Other ranks return [].

    The transfer is point to point: rank `to` and the entries' source ranks must call it; on others
    it does nothing. A source rank sends the bytes of its shards as one flat tensor.
    """
    rank = dist.get_rank()
    mine = {
        i: shards[i]().to(plan.entries[i].sent_dtype or dtype)
        for i in indices
        if rank in plan.source_ranks[i]
    }
    if rank != to:
        if mine:
            parts = [shard.flatten().view(torch.uint8) for shard in mine.values()]
            dist.send(torch.cat(parts), to)
        return []
    pieces = {to: mine}
    for source_rank in sorted({r for i in indices for r in plan.source_ranks[i]} - {to}):
        pieces[source_rank] = _receive(
            plan, [i for i in indices if source_rank in plan.source_ranks[i]], source_rank, dtype
        )
    tensors: NamedTensors = []
    for _, group in groupby(indices, key=lambda index: plan.entries[index].hf):
        tensors += to_hf([(plan.entries[i], _whole(plan, i, pieces)) for i in group])
    return tensors


def to_hf(parts: Sequence[tuple[Entry, Tensor]]) -> NamedTensors:
    """Convert full Megatron tensors to HF names and tensors.

    parts: One entry with its tensor, or consecutive experts of one stack, in order. Experts become
    a piece of the stack (`piece_name`) with shape [experts, in, out], laid out in memory as servers
    store them.
    """
    entry, full = parts[0]
    if entry.expert is None:
        return list(zip(entry.hf, entry.to_hf(full), strict=True))
    experts = [entry.expert for entry, _ in parts if entry.expert is not None]
    assert experts == [*range(experts[0], experts[0] + len(parts))], f"{entry.hf} has gaps"
    rows = zip(*(entry.to_hf(full) for entry, full in parts), strict=True)
    return [
        (
            piece_name(name, experts, entry.hf_shapes[0][0]),
            torch.stack([x.t() if entry.transposed else x for x in row]).transpose(1, 2),
        )
        for name, row in zip(entry.hf, rows, strict=True)
    ]


def local_shards(
    plan: SyncPlan, chunks: Sequence[MegatronModule], *, merged: bool = True
) -> dict[int, LocalShard]:
    """Return this rank's shards, by index of the entry.

    merged: If true, a weight with a LoRA adapter is returned with the adapter merged; otherwise
    without the adapter.

    Asserts that this rank holds every shard that the plan has it send, and that the plan's changed
    entries are the ones trained here. A tensor counts as trained if it shares the storage of a
    parameter that requires grad.
    """
    table = {(entry.megatron, entry.expert): index for index, entry in enumerate(plan.entries)}
    shards: dict[int, LocalShard] = {}
    changed = set()
    for chunk in chunks:
        trained = {p.data_ptr() for p in chunk.parameters() if p.requires_grad}
        adapted = {adapter.weight.data_ptr(): adapter for _, adapter in adapters(chunk)}
        for held in local_tensors(chunk):
            index = table.get((held.key, held.expert))
            if index is None:
                continue  # an adapter's own tensor, or a value head
            pointer = held.data.data_ptr()
            is_merged = merged and pointer in adapted
            shards[index] = adapted[pointer].merged_weight if is_merged else held.data.detach
            if pointer in trained or is_merged:
                changed.add(index)
    _check(plan, set(shards), changed)
    return shards


def _whole(plan: SyncPlan, index: int, pieces: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
    return unshard(plan.entries[index], [pieces[rank][index] for rank in plan.source_ranks[index]])


def _receive(
    plan: SyncPlan, indices: Sequence[int], source_rank: int, dtype: torch.dtype
) -> dict[int, Tensor]:
    shapes, dtypes = [], []
    for index in indices:
        entry, parts = plan.entries[index], len(plan.source_ranks[index])
        shape = list(entry.megatron_shape)
        if entry.shard.dim is not None:
            shape[entry.shard.dim] //= parts
        shapes.append(torch.Size(shape))
        dtypes.append(entry.sent_dtype or dtype)
    sizes = [shape.numel() * kind.itemsize for shape, kind in zip(shapes, dtypes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=platform.device())
    dist.recv(flat, source_rank)
    return {
        index: _as_dtype(piece, kind).view(shape)
        for index, piece, kind, shape in zip(
            indices, flat.split(sizes), dtypes, shapes, strict=True
        )
    }


def _as_dtype(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """View a slice of bytes as `dtype`. The slice is copied if its offset is not aligned to
    `dtype`.
    """
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)


def _check(plan: SyncPlan, held: set[int], changed: set[int]) -> None:
    rank = dist.get_rank()
    missing = plan.sent_from(rank) - held
    assert not missing, f"rank {rank} has no {plan.entries[min(missing)].megatron}"
    stage = rank // plan.trainer.per_stage
    for index in held:
        key = plan.entries[index].megatron
        assert plan.stages[index] == stage or key == TIED, f"{key} is on rank {rank} too"
    wrong = (plan.changed & held) ^ changed
    assert not wrong, f"training and plan differ in {plan.entries[min(wrong)].megatron}"

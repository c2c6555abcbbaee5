"""Which ranks give which shards of which tensors, and in which portions they are sent."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.models.common.loading import local_tensors
from megavlm.models.common.lora import adapters
from megavlm.models.common.mapping import Entry
from megavlm.parallel.mesh import ShardAxis

Place = Callable[[ShardAxis], tuple[int, int]]  # this rank and the number of ranks on an axis
Shard = Callable[[], Tensor]  # this rank's part of a Megatron tensor, as it is now


@dataclass(frozen=True)
class Plan:
    """Indices are of `entries`. givers: the global ranks that hold the shards of each, in shard
    order; where several hold the same shard, the first of them. changed: what training can change.
    """

    entries: Sequence[Entry]
    givers: Mapping[int, tuple[int, ...]]
    changed: frozenset[int]

    def portions(self, *, full: bool, itemsize: int, max_bytes: int) -> Iterator[list[int]]:
        """Runs of entries whose whole tensors take at most `max_bytes`; a single one may take more.
        Without `full` only what training can change.
        """
        run: list[int] = []
        size = 0
        wanted = sorted(self.givers if full else self.changed)
        for _, group in groupby(wanted, key=lambda index: self.entries[index].hf):
            indices = list(group)  # one, or all experts of a stack
            elements = sum(math.prod(self.entries[index].megatron_shape) for index in indices)
            if run and size + elements * itemsize > max_bytes:
                yield run
                run, size = [], 0
            run += indices
            size += elements * itemsize
        if run:
            yield run


def local_shards(
    entries: Sequence[Entry], chunks: Sequence[MegatronModule]
) -> tuple[dict[int, Shard], set[int]]:
    """This rank's shards by entry, and the entries that training can change here.

    A tensor is trained where its storage is that of a parameter that requires grad. One with an
    adapter is given as the two merged.
    """
    table = {(entry.megatron, entry.expert): index for index, entry in enumerate(entries)}
    shards: dict[int, Shard] = {}
    changed = set()
    for chunk in chunks:
        trained = {p.data_ptr() for p in chunk.parameters() if p.requires_grad}
        adapted = {linear.base.weight.data_ptr(): linear for _, linear in adapters(chunk)}
        for target in local_tensors(chunk):
            index = table.get((target.key, target.expert))
            if index is None:
                continue  # an adapter's own, or a value head
            pointer = target.data.data_ptr()
            if pointer in adapted:
                shards[index] = adapted[pointer].merged_weight
            else:
                shards[index] = target.data.detach
            if pointer in trained or pointer in adapted:
                changed.add(index)
    return shards, changed


def make_plan(
    entries: Sequence[Entry],
    shards: Mapping[int, Shard],
    changed: set[int],
    place: Place,
    objects: dist.ProcessGroup | None,
) -> Plan:
    """The same on every rank. Collective over `objects`."""
    mine = {}
    for index in shards:
        rule = entries[index].shard
        mine[index] = (0 if rule.dim is None else place(rule.axis)[0], index in changed)
    everyone: list[dict[int, tuple[int, bool]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine, group=objects)
    holders: dict[int, dict[int, int]] = {}
    for rank, theirs in enumerate(everyone):
        for index, (position, _) in theirs.items():
            holders.setdefault(index, {}).setdefault(position, rank)
    return Plan(
        entries,
        {
            index: tuple(by_place[i] for i in sorted(by_place))
            for index, by_place in holders.items()
        },
        frozenset(i for theirs in everyone for i, (_, is_changed) in theirs.items() if is_changed),
    )

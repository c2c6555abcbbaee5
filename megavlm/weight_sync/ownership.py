"""Plan of weight updates: the trainer ranks that send each tensor's shards, and the buckets.

All functions are pure functions of the mapping table and the layout, for any number of ranks, and
need no process group. `gather.local_shards` asserts that the running ranks hold the tensors that
the plan assigns to them.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.sglang_layout import parameter_name

_LAYER = re.compile(r"language_model\.decoder\.layers\.(\d+)\.")
_LAST_STAGE = (
    "language_model.decoder.final_layernorm.",
    "language_model.output_layer.",
    "draft_head.",
)
TIED = "language_model.embedding.word_embeddings.weight"  # if tied, the last stage has a copy


@dataclass(frozen=True)
class TrainerRanks:
    """Trainer ranks in megatron-core's order: the tensor axis varies fastest, the pipeline stage
    slowest.

    layer_stages: Pipeline stage of each language layer. per_node: Number of ranks on each node;
    None if all ranks are on one node.
    """

    layout: Layout = field(default_factory=Layout)
    world_size: int = 1
    layer_stages: tuple[int, ...] = ()
    per_node: int | None = None

    @classmethod
    def of(
        cls,
        hf_config: Any,
        layout: Layout,
        world_size: int,
        options: ModelOptions,
        per_node: int | None = None,
    ) -> "TrainerRanks":
        """Return the ranks of a run whose layout has passed `check_model_layout`."""
        first, last = options.first_stage_layers, options.last_stage_layers
        layers = hf_config.text_config.num_hidden_layers
        stages = layer_stages(layers, layout, first, last)
        return cls(layout, world_size, stages, per_node)

    @property
    def per_stage(self) -> int:
        return self.world_size // self.layout.pipeline

    def node(self, rank: int) -> int:
        """Return the index of the node that a rank is on, as torchrun numbers ranks."""
        return rank // (self.per_node or self.world_size)

    def first_of(self, stage: int) -> int:
        return stage * self.per_stage

    def stage(self, entry: Entry) -> int:
        """Return the pipeline stage that holds an entry."""
        if match := _LAYER.match(entry.megatron):
            return self.layer_stages[int(match[1])]
        # The tower and the embedding are on the first stage.
        return self.layout.pipeline - 1 if entry.megatron.startswith(_LAST_STAGE) else 0

    def source_ranks(self, entry: Entry) -> tuple[int, ...]:
        """Return the first rank that holds each shard of an entry, in shard order."""
        shards, first, _ = self._shards(entry)
        return tuple(range(first, first + shards))

    def holders(self, entry: Entry, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold a shard of an entry: data and context ranks hold the same
        shard, and so do tensor ranks if the entry is not sharded.
        """
        shards, first, size = self._shards(entry)
        period = size * (1 if entry.expert is None else self.layout.expert)
        stage = self.first_of(self.stage(entry))
        indices = range(shard, shard + (1 if shards == size else size))
        start = first - stage
        return tuple(
            stage + offset for offset in range(self.per_stage) if offset % period - start in indices
        )

    def _shards(self, entry: Entry) -> tuple[int, int, int]:
        """Return the number of an entry's shards, the first rank that holds one, and the number of
        ranks on the axis that would shard it.
        """
        first = self.first_of(self.stage(entry))
        size = self.layout.tensor if entry.shard.axis == "tensor" else self.layout.expert_tensor
        if entry.expert is not None:
            count = entry.hf_shapes[0][0]
            first += entry.expert * self.layout.expert // count * self.layout.expert_tensor
        return 1 if entry.shard.dim is None else size, first, size


def layer_stages(
    num_layers: int, layout: Layout, first: int | None = None, last: int | None = None
) -> tuple[int, ...]:
    """Return the pipeline stage of each layer.

    first, last: Number of layers of the first and the last stage, if the split is not even. With
    virtual stages the layers are dealt round-robin, one chunk per stage and round.
    """
    stages = layout.pipeline
    counts: list[int | None] = [None] * stages
    if stages > 1:
        counts[0], counts[-1] = first, last
    given = [count for count in counts if count is not None]
    others = stages - len(given)
    even = (num_layers - sum(given)) // others if others else 0
    per_stage = [even if count is None else count for count in counts]
    return tuple(
        stage
        for _ in range(layout.virtual)
        for stage, count in enumerate(per_stage)
        for _ in range(count // layout.virtual)
    )


@dataclass(frozen=True)
class Bucket:
    """Entries of one pipeline stage that are sent together.

    changed: True for entries that training can change; every server gets them. Other entries go
    only to servers that need every tensor.
    """

    stage: int
    entries: tuple[int, ...]
    changed: bool


@dataclass(frozen=True)
class SyncPlan:
    """Plan of a run's weight updates.

    entries: The mapping table that all indices refer to. changed: Indices of the entries that
    training can change.
    """

    entries: Sequence[Entry]
    trainer: TrainerRanks
    changed: frozenset[int]

    @cached_property
    def source_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that send the shards of each entry, in shard order."""
        return tuple(self.trainer.source_ranks(entry) for entry in self.entries)

    @cached_property
    def holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks that hold each shard of each entry."""
        known: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        held = []
        for entry, sources in zip(self.entries, self.source_ranks, strict=True):
            key = (*sources, int(entry.shard.dim is None), int(entry.expert is None))
            if key not in known:
                shards = range(len(sources))
                known[key] = tuple(self.trainer.holders(entry, shard) for shard in shards)
            held.append(known[key])
        return tuple(held)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stage of each entry."""
        return tuple(self.trainer.stage(entry) for entry in self.entries)

    def sent_from(self, rank: int) -> set[int]:
        """Return the indices of the entries of which `rank` sends a shard."""
        return {index for index, ranks in enumerate(self.source_ranks) if rank in ranks}

    def buckets(self, *, full: bool, itemsize: int, max_bytes: int) -> Iterator[Bucket]:
        """Yield buckets stage by stage: first the entries that training can change; the rest only
        with `full`. Entries with their own dtype are in separate buckets.

        itemsize: Bytes per number of the servers' dtype. The full tensors of a bucket take at most
        `max_bytes`; a single tensor may take more.
        """
        for stage in range(self.trainer.layout.pipeline):
            mine = [index for index in range(len(self.entries)) if self.stages[index] == stage]
            for changed in (True, False) if full else (True,):
                wanted = [index for index in mine if (index in self.changed) is changed]
                for dtype in (None, torch.float32):
                    typed = [index for index in wanted if self.entries[index].sent_dtype == dtype]
                    size = itemsize if dtype is None else dtype.itemsize
                    for run in self._runs(typed, size, max_bytes):
                        yield Bucket(stage, tuple(run), changed)

    def _runs(self, indices: Collection[int], itemsize: int, max_bytes: int) -> Iterator[list[int]]:
        """Split entries into runs of at most `max_bytes`. The parts of one server parameter stay in
        one run, except for the experts of a stack.
        """
        groups: dict[tuple[str, int | None], list[int]] = {}
        for index in indices:
            entry = self.entries[index]
            groups.setdefault((parameter_name(entry.hf[0]), entry.expert), []).append(index)
        run: list[int] = []
        size = 0
        for parts in groups.values():
            num_bytes = itemsize * sum(numel(self.entries[index]) for index in parts)
            if run and size + num_bytes > max_bytes:
                yield run
                run, size = [], 0
            run += parts
            size += num_bytes
        if run:
            yield run


def numel(entry: Entry) -> int:
    """Return the number of elements of an entry's full Megatron tensor, for an expert its share of
    the stack.
    """
    count = sum(math.prod(shape) for shape in entry.hf_shapes)
    return count if entry.expert is None else count // entry.hf_shapes[0][0]

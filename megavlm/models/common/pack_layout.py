"""Layout of a pack for attention, and the data that the backends of the core attention prepare from
it, once for all layers.

A token attends to the segments that its own segment continues, and to the earlier tokens of its own
segment. For a stretch of this rank's tokens this is a causal sequence: its keys are the tokens of
the ancestors, root first, then the segment up to the end of the stretch. Its queries are the last
of these tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megavlm.data.packs.context_parallel import SegmentRun
from megavlm.data.packs.packing import Pack
from megavlm.data.packs.routed_experts import RoutedExperts
from megavlm.models.common.rotary import RotaryTables
from megavlm.models.common.varlen import cumulative_bounds

PADDING = 1.25  # limit of (query, key) pairs in a padded batch, relative to its sequences' pairs


class CausalSequence(NamedTuple):
    """Causal sequence. The queries are the last `num_queries` keys; each attends to itself and to
    the keys before it.

    keys: Stretches (first, end) of the pack's tokens.
    """

    num_queries: int
    keys: tuple[tuple[int, int], ...]

    @property
    def num_keys(self) -> int:
        return sum(end - first for first, end in self.keys)

    @property
    def is_contiguous(self) -> bool:
        """True if the keys follow one another in the pack."""
        return self.keys[-1][1] - self.keys[0][0] == self.num_keys


class SequenceBatch(NamedTuple):
    """Causal sequences of similar length, padded at their ends, as the batch of one kernel call.

    queries: [B, q] Indices into this rank's tokens.
    keys: [B, k] Indices into the pack's tokens.
    mask: [B, 1, q, k] True where a query attends to a key. None is a plain causal mask.

    For one sequence with contiguous keys, queries and keys are slices, so that nothing is copied
    and kept for the backward pass.
    """

    queries: Tensor | slice
    keys: Tensor | slice
    mask: Tensor | None


@dataclass(frozen=True)
class Sequences:
    """B causal sequences of this rank's tokens, in the form that variable-length kernels take. The
    kernels align the last query of a sequence with its last key.
    """

    key_index: Tensor | None  # pack index of each key; None if the keys are the unchanged pack
    query_bounds: Tensor  # [B + 1] int32
    key_bounds: Tensor  # [B + 1] int32
    max_queries: int
    max_keys: int


@dataclass(kw_only=True)
class PackLayout(PackedSeqParams):
    """Layout of a pack, without its tokens. The fields have the meaning that they have in Pack.

    megatron-core passes it to layers as its packed-sequence parameters. `qkv_format` is "sbhd"
    because positions are given per token, and megatron-core's rotary code for "thd" would count
    positions anew in each sequence.
    """

    qkv_format: str = "sbhd"
    token_index: Tensor
    gather_index: Tensor
    runs: tuple[SegmentRun, ...]
    segment_ids: Tensor
    ancestors: Tensor
    parents: tuple[int, ...]
    segment_bounds: tuple[int, ...]
    tree_bounds: tuple[int, ...]
    block_mask: Any = None  # for flex, created on first use
    tree_scan: Any = None  # for linear attention, created on first use
    routed_experts: RoutedExperts | None = None  # of this rank's hidden states
    rotary: RotaryTables | None = None  # of this rank's tokens; None if layers take angles

    @classmethod
    def of(cls, pack: Pack, **more: Any) -> Self:
        """Return the layout of a pack, or of a rank's part of it. `more`: fields of a subclass."""
        return cls(
            token_index=pack.token_index,
            gather_index=pack.gather_index,
            runs=pack.runs,
            segment_ids=pack.segment_ids,
            ancestors=pack.ancestors,
            parents=pack.parents,
            segment_bounds=pack.segment_bounds,
            tree_bounds=pack.tree_bounds,
            **more,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole pack."""
        return self.tree_bounds[-1]

    @cached_property
    def batches(self) -> tuple[list[SequenceBatch], Tensor | None]:
        """Batches of causal sequences for a dense kernel, and the index [t] of each of this rank's
        tokens among the queries of all batches, or None if they are in order.
        """
        sequences = causal_sequences(self.runs, self.parents, self.segment_bounds)
        starts = [*accumulate((sequence.num_queries for sequence in sequences), initial=0)]
        gathered = [row for row, item in enumerate(sequences) if not item.is_contiguous]
        sizes = [(sequences[row].num_queries, sequences[row].num_keys) for row in gathered]
        groups = [[row] for row, item in enumerate(sequences) if item.is_contiguous]
        groups += [[gathered[index] for index in indices] for indices in similar(sizes)]
        device = self.token_index.device
        order, place = torch.empty(starts[-1], dtype=torch.long), 0
        batches: list[SequenceBatch] = []
        for rows in groups:
            first = starts[rows[0]]
            queries, keys, own, mask = _padded_batch([sequences[row] for row in rows])
            queries += torch.tensor([starts[row] for row in rows])[:, None]
            order[queries[own]] = place + torch.arange(queries.numel()).view_as(queries)[own]
            place += queries.numel()
            mask = None if mask is None else mask.to(device)
            if sequences[rows[0]].is_contiguous:
                stretch = slice(int(keys[0, 0]), int(keys[0, -1]) + 1)
                batches.append(SequenceBatch(slice(first, first + queries.numel()), stretch, mask))
            else:
                batches.append(SequenceBatch(queries.to(device), keys.to(device), mask))
        in_order = torch.equal(order, torch.arange(len(order)))
        return batches, None if in_order else order.to(device)

    @cached_property
    def sequences(self) -> Sequences:
        """Causal sequences for a variable-length kernel."""
        sequences = causal_sequences(self.runs, self.parents, self.segment_bounds)
        queries = [sequence.num_queries for sequence in sequences]
        keys = [sequence.num_keys for sequence in sequences]
        stretches = (stretch for sequence in sequences for stretch in sequence.keys)
        key_index = torch.cat([torch.arange(first, end) for first, end in stretches])
        is_the_pack = key_index.equal(torch.arange(self.num_tokens))
        device = self.token_index.device
        return Sequences(
            key_index=None if is_the_pack else key_index.to(device),
            query_bounds=cumulative_bounds(queries, device),
            key_bounds=cumulative_bounds(keys, device),
            max_queries=max(queries),
            max_keys=max(keys),
        )


def attends(query: Tensor, key: Tensor, segment_ids: Tensor, ancestors: Tensor) -> Tensor:
    """Return True where token `query` of the pack attends to token `key`: [q, 1] and [1, k] give
    [q, k].
    """
    return ancestors[segment_ids[query], segment_ids[key]] & (key <= query)


def causal_sequences(
    runs: Iterable[SegmentRun], parents: Sequence[int], segment_bounds: Sequence[int]
) -> list[CausalSequence]:
    """Return the causal sequences of runs, in their order. A run that starts where the run of its
    parent segment ends is joined with it.
    """
    sequences: list[CausalSequence] = []
    previous: SegmentRun | None = None
    for run in runs:
        own = (segment_bounds[run.segment], run.end)
        if (
            previous is not None
            and previous.end == run.first
            and previous.segment == parents[run.segment]
        ):
            num_queries, keys = sequences.pop()
        else:
            num_queries, keys = 0, _path(run.segment, parents, segment_bounds)
        sequences.append(CausalSequence(num_queries + run.end - run.first, (*keys, own)))
        previous = run
    return sequences


def similar(sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Group sequences of sizes (queries, keys) into batches. Yields the indices of each batch.

    A padded batch has at most PADDING times the (query, key) pairs of its sequences.
    """
    rows, pairs, longest = list[int](), 0, 0
    for row in sorted(range(len(sizes)), key=lambda row: sizes[row]):
        q, k = sizes[row]
        pairs, longest = pairs + q * k, max(longest, k)
        if rows and (len(rows) + 1) * q * longest > PADDING * pairs:
            yield rows
            rows, pairs, longest = [], q * k, k
        rows.append(row)
    if rows:
        yield rows


def _padded_batch(
    sequences: Sequence[CausalSequence],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Pad sequences to the longest one. Places beyond the end of a sequence repeat its last token.

    Returns the places of queries in their sequence [B, q], the places of keys in the pack [B, k],
    whether a query is not padding [B, q], and the mask of a SequenceBatch.
    """
    q = torch.tensor([sequence.num_queries for sequence in sequences])[:, None]
    k = torch.tensor([sequence.num_keys for sequence in sequences])[:, None]
    in_q, in_k = torch.arange(int(q.max())), torch.arange(int(k.max()))
    queries = in_q.minimum(q - 1)
    keys = torch.stack([_padded(sequence.keys, len(in_k)) for sequence in sequences])
    mask = None
    if len(sequences) > 1 or len(in_q) < len(in_k):
        mask = (in_k <= (k - q + queries)[:, :, None])[:, None]  # up to each query's own token
    return queries, keys, in_q < q, mask


def _padded(stretches: Iterable[tuple[int, int]], length: int) -> Tensor:
    """Return the tokens of stretches. The last one is repeated up to `length`."""
    tokens = torch.cat([torch.arange(first, end) for first, end in stretches])
    return tokens[torch.arange(length).clamp(max=len(tokens) - 1)]


def _path(
    segment: int, parents: Sequence[int], segment_bounds: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the stretches of a segment's ancestors, root first, without the segment itself."""
    path: list[tuple[int, int]] = []
    while (segment := parents[segment]) >= 0:
        path.insert(0, (segment_bounds[segment], segment_bounds[segment + 1]))
    return tuple(path)

"""Distribution of a pack's tokens over context-parallel ranks.

Each segment is split into 2C consecutive chunks for C ranks; rank r holds chunks r and 2C - 1 - r.
The cost of a token grows with its position in the segment, so that an early and a late chunk
together cost about the same on every rank.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class SegmentRun(NamedTuple):
    """Consecutive tokens of one segment: tokens `first` to `end` - 1 of the pack."""

    segment: int
    first: int
    end: int


def split_segments(
    segment_bounds: Sequence[int], context_size: int
) -> list[tuple[SegmentRun, ...]]:
    """Return the runs of each context rank in ascending order.

    segment_bounds: The first token of each segment, followed by the number of tokens.

    The chunks of a segment differ by at most one token, and so do the ranks' totals. The totals are
    equal if the number of tokens is a multiple of context_size.
    """
    loads = [0] * context_size
    runs: list[list[SegmentRun]] = [[] for _ in loads]
    for segment, first in enumerate(segment_bounds[:-1]):
        sizes = _chunk_sizes(segment_bounds[segment + 1] - first, loads)
        bounds = list(accumulate(sizes, initial=first))
        for rank in range(context_size):
            early, late = rank, len(sizes) - 1 - rank
            loads[rank] += sizes[early] + sizes[late]
            if late == early + 1:  # neighbours
                pieces = [SegmentRun(segment, bounds[early], bounds[late + 1])]
            else:
                pieces = [SegmentRun(segment, bounds[i], bounds[i + 1]) for i in (early, late)]
            runs[rank].extend(run for run in pieces if run.end > run.first)
    return [tuple(of_rank) for of_rank in runs]


def _chunk_sizes(size: int, loads: Sequence[int]) -> list[int]:
    """Return the sizes of a segment's 2C chunks. The remainder goes to the ranks with the fewest
    tokens so far, one token per chunk.
    """
    context_size = len(loads)
    each, rest = divmod(size, 2 * context_size)
    chunks = [each] * (2 * context_size)
    everyone, rest = divmod(rest, context_size)
    least = sorted(range(context_size), key=lambda rank: loads[rank])[:rest]
    for rank in range(context_size):
        chunks[rank] += everyone
    for rank in least:
        chunks[2 * context_size - 1 - rank] += 1
    return chunks


def run_tokens(runs: Iterable[SegmentRun]) -> Tensor:
    """Return the pack indices [t] int64 of the tokens of `runs`, run after run."""
    pieces = [torch.arange(run.first, run.end) for run in runs]
    return torch.cat([torch.empty(0, dtype=torch.long), *pieces])

"""How the tokens of a pack are shared out over context ranks.

Each segment is cut into 2C consecutive chunks for C ranks; rank r holds the chunks r and
2C - 1 - r. A token's work grows with its place in the segment, so an early and a late chunk
together cost every rank about the same.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Consecutive tokens `first` to `end` - 1 of a pack, all of one segment."""

    segment: int
    first: int
    end: int


def cut(segment_bounds: Sequence[int], context_size: int) -> list[tuple[Run, ...]]:
    """The runs of each context rank, ascending.

    segment_bounds: first token of each segment, then the number of tokens.

    Chunks of a segment differ by at most one token, and ranks by at most one token in all: where
    the number of tokens is a multiple of context_size, every rank holds equally many.
    """
    loads = [0] * context_size
    runs: list[list[Run]] = [[] for _ in loads]
    for segment, first in enumerate(segment_bounds[:-1]):
        sizes = _chunk_sizes(segment_bounds[segment + 1] - first, loads)
        bounds = list(accumulate(sizes, initial=first))
        for rank in range(context_size):
            early, late = rank, len(sizes) - 1 - rank
            loads[rank] += sizes[early] + sizes[late]
            if late == early + 1:  # neighbours
                pieces = [Run(segment, bounds[early], bounds[late + 1])]
            else:
                pieces = [Run(segment, bounds[i], bounds[i + 1]) for i in (early, late)]
            runs[rank].extend(run for run in pieces if run.end > run.first)
    return [tuple(of_rank) for of_rank in runs]


def _chunk_sizes(size: int, loads: Sequence[int]) -> list[int]:
    """Of a segment's 2C chunks. What does not divide goes to the ranks that have least so far, one
    token to each chunk.
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


def tokens_of(runs: Iterable[Run]) -> Tensor:
    """Pack indices [t] of the tokens of `runs`, run after run."""
    pieces = [torch.arange(run.first, run.end) for run in runs]
    return torch.cat([torch.empty(0, dtype=torch.long), *pieces])

"""Sums and scans over sequences in one flat row of tokens.

There are N tokens and S sequences. `ids` [N] int64 in 0..S-1 holds the sequence of each token. The
tokens of a sequence are in order, but tokens of other sequences may be between them. If sequences
are split over ranks (context parallelism), `reduce` sums a tensor over those ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor (any shape) unchanged: `reduce` for a rank with whole sequences."""
    return tensor


def segment_sum(values: Tensor, ids: Tensor, num: int, reduce: Reduce = identity) -> Tensor:
    """Return the sum [S] of `values` [N] over each sequence, S = `num`."""
    return reduce(values.new_zeros(num).index_add(0, ids, values))


def segment_mean(values: Tensor, ids: Tensor, num: int, reduce: Reduce = identity) -> Tensor:
    """Return the mean [S] over each sequence; 0 for a sequence without tokens."""
    both = torch.stack([values, torch.ones_like(values)])
    sums, counts = reduce(values.new_zeros(2, num).index_add(1, ids, both))
    return sums / counts.clamp(min=1.0)


def next_in_sequence(values: Tensor, ids: Tensor) -> Tensor:
    """Return for each token [N] the value at the next token of its sequence, or 0 at the last one.
    Requires whole sequences.
    """
    order = ids.argsort(stable=True)
    following, same = values[order].roll(-1), ids[order] == ids[order].roll(-1)
    if len(order):
        same[-1] = False
    result = torch.empty_like(values)
    result[order] = following * same
    return result


def discounted_sums(values: Tensor, ids: Tensor, discount: float) -> Tensor:
    """Compute y_t = values_t + discount * y_(t+1) [N] within each sequence, from its last token
    backward. Requires whole sequences. The number of tensor operations is the longest length.
    """
    if not len(values):
        return values.clone()
    order = ids.argsort(stable=True)
    _, rows, lengths = ids[order].unique_consecutive(return_inverse=True, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(len(order), device=ids.device) - starts[rows]
    table = values.new_zeros(int(lengths.max()), len(lengths))  # [length, S]: a row is contiguous
    table[columns, rows] = values[order]
    for step in range(len(table) - 2, -1, -1):
        table[step] += discount * table[step + 1]
    result = torch.empty_like(values)
    result[order] = table[columns, rows]
    return result

"""Normalisation of advantages over a whole batch of tokens, whichever ranks hold them."""

import torch
from torch import Tensor

from megavlm.algorithms.segments import Reduce, identity

_EPSILON = 1e-8


def whiten(values: Tensor, counted: Tensor, reduce: Reduce = identity) -> Tensor:
    """Compute (v - mean) / sqrt(variance + 1e-8) over the counted tokens of all ranks: REINFORCE++
    (arXiv 2501.03262), and common in PPO. Collective.

    values: [N]. counted: [N] bool. `reduce` sums over all ranks that hold tokens of the batch. If
    all values are equal, the result is exactly zero, because sums are in float64, in which the mean
    of equal numbers is the number itself.
    """
    exact = values.double()
    total, count = reduce(torch.stack([exact[counted].sum(), counted.double().sum()]))
    centred = exact - total / count.clamp(min=1.0)
    squares = reduce(centred[counted].square().sum())
    variance = squares / (count - 1).clamp(min=1.0)
    return (centred / (variance + _EPSILON).sqrt()).to(values.dtype)

"""The critic's loss."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute (V - R)^2 / 2 per token; with `clip` the larger of it and the loss of V held within
    `clip` of the old value (PPO, arXiv 1707.06347; Engstrom et al., arXiv 2005.12729). All tensors
    are [N]. Returns the loss, and a bool that is True where the bound is active.
    """
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    held = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (held - returns).square()
    return 0.5 * torch.maximum(free, bounded), bounded.detach() > free.detach()


def explained_variance(
    count: float, returns: float, squares: float, errors: float, error_squares: float
) -> float:
    """Compute 1 - Var(R - V) / Var(R) from sums over tokens: of 1, R, R^2, R - V, (R - V)^2.

    1: the critic predicts every return; 0: no better than their mean; negative: worse. NaN if all
    returns are equal, or there are none.
    """
    if not count:
        return float("nan")
    variance = squares / count - (returns / count) ** 2
    unexplained = error_squares / count - (errors / count) ** 2
    return 1.0 - unexplained / variance if variance > 1e-12 else float("nan")

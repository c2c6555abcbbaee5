"""The critic's loss."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute (V - R)^2 / 2 per token.

    With `clip`, the loss is the maximum of this and the loss of V clamped to within `clip` of the
    old value (PPO, arXiv 1707.06347; Engstrom et al., arXiv 2005.12729). All tensors are [N].
    Returns the loss, and a bool tensor that is True for tokens whose bound is active.
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
    """Compute 1 - Var(R - V) / Var(R) from the sums of 1, R, R^2, R - V and (R - V)^2 over tokens.

    It is 1 if the critic predicts every return, 0 if it is no better than their mean, and negative
    if it is worse. It is NaN if all returns are equal, or if there are none.
    """
    if not count:
        return float("nan")
    variance = squares / count - (returns / count) ** 2
    unexplained = error_squares / count - (errors / count) ** 2
    is_spread = variance > 1e-12 * squares / count  # more than the rounding of equal returns
    return 1.0 - unexplained / variance if is_spread else float("nan")

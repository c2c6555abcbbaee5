"""Which groups teach something."""

import torch
from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """True for a group whose rewards differ. rewards: [num_groups, n]; returns [num_groups] bool.

    Without a difference every advantage is zero, so the group adds nothing to the policy gradient.
    DAPO's dynamic sampling (arXiv 2503.14476) draws other prompts in place of such groups.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def differs(rewards: Tensor, groups: Tensor, counted: Tensor | None = None) -> Tensor:
    """The same of a flat row: [S] bool, True for a response whose group has signal among those that
    are counted ([S] bool; None: all). groups: [S] int64 in 0..S-1.
    """
    known = torch.ones_like(groups, dtype=torch.bool) if counted is None else counted
    bounds = [
        torch.zeros_like(rewards).scatter_reduce(
            0, groups[known], rewards[known], how, include_self=False
        )
        for how in ("amin", "amax")
    ]
    return (bounds[0] != bounds[1])[groups]

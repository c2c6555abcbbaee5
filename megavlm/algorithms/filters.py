"""Which groups teach something."""

import torch
from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """True for a group whose rewards differ. rewards: [num_groups, n]; returns [num_groups] bool.

    Without a difference every advantage is zero, so the group adds nothing to the policy gradient.
    DAPO's dynamic sampling (arXiv 2503.14476) draws other prompts in place of such groups.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def differs(rewards: Tensor, groups: Tensor) -> Tensor:
    """The same of a flat row: [S] bool, True for a response whose group has signal. groups: [S]
    int64 in 0..S-1.
    """
    bounds = [
        torch.zeros_like(rewards).scatter_reduce(0, groups, rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    return (bounds[0] != bounds[1])[groups]

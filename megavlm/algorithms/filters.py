"""Which groups teach something."""

from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """True for a group whose rewards differ. rewards: [num_groups, n]; returns [num_groups] bool.

    Without a difference every advantage is zero, so the group adds nothing to the policy gradient.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)

"""DAPO's dynamic sampling and its penalty for long responses (arXiv 2503.14476)."""

from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """Return [num_groups] bool, True for a group whose rewards differ. rewards: [num_groups, n].

    Without a difference every advantage is zero, so the group adds nothing to the policy gradient.
    Dynamic sampling draws other prompts in place of such groups.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Compute the soft punishment of a long response (equation 13), in -1..0.

    0 up to max_length - buffer tokens, then linear, -1 at max_length.
    """
    assert 0 < buffer <= max_length
    excess = length - (max_length - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)

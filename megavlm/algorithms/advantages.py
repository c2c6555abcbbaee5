"""Group-relative advantages.

GRPO (arXiv 2402.03300); without the division by the deviation, Dr. GRPO (arXiv 2503.20783).
"""

from torch import Tensor

from megavlm.algorithms.filters import has_signal

# Only keeps the division defined: rewards that differ at all differ by far more than this.
_EPSILON = 1e-6


def group_advantages(rewards: Tensor, normalize_by_std: bool) -> Tensor:
    """Each response's reward relative to its group.

    rewards: [num_groups, n], one per response to each prompt. Returns [num_groups, n].
    A group whose rewards are all equal, or that has one response, gets exactly zero: subtracting a
    rounded mean would leave noise that the division by a tiny deviation makes large.
    """
    signal = has_signal(rewards)[:, None]
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + _EPSILON)
    return advantages.where(signal, 0.0)

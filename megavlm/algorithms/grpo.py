"""Advantages of whole responses, relative to the other responses to their prompt.

S responses; `rewards` [S]; `groups` [S] int64, the group that each response belongs to, in
0..S-1. A group whose rewards are all equal (see `differs`) gets exactly zero, because subtracting a
rounded mean would leave noise, which the division by a tiny deviation, or Adam, would amplify. Sums
are in float64.

`counted` [S] bool: True for responses whose reward is known; None counts all. The others get the
advantage zero and are left out of all sums and counts, as if they were not in the group.
"""

import torch
from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs, advantage_estimator
from megavlm.algorithms.segments import segment_sum
from megavlm.config.algorithm import GRPO
from megavlm.numbers import ROUNDING

# It only keeps the division defined: rewards that differ do so by far more than this.
_EPSILON = 1e-6


@advantage_estimator(needs_group=True, within_groups=True, of_turns=True)
def grpo(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Compute `group_relative` advantages [N]; `normalize_by_std=false` gives Dr. GRPO."""
    made = group_relative(
        inputs.sequence_rewards,
        inputs.group_ids,
        normalize_by_std=settings.normalize_by_std,
        counted=inputs.has_reward,
    )
    return made[inputs.sequence_ids]


@advantage_estimator(needs_group=True, within_groups=True, of_turns=True)
def rloo(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Compute `leave_one_out` advantages [N]."""
    made = leave_one_out(inputs.sequence_rewards, inputs.group_ids, inputs.has_reward)
    return made[inputs.sequence_ids]


def group_relative(
    rewards: Tensor, groups: Tensor, *, normalize_by_std: bool, counted: Tensor | None = None
) -> Tensor:
    """Compute (r - mean) / (std + 1e-6) over the group, std with n - 1: GRPO (arXiv 2402.03300).
    Without the division: Dr. GRPO (arXiv 2503.20783).

    rewards: [S] of each response. groups: [S] int64, the group of each response. counted: [S] bool,
    False for responses that are left out. Returns [S]: rewards [1, 0, 0, 0] of one group give
    [1.5, -0.5, -0.5, -0.5].
    """
    num = len(rewards)
    exact, ones = _known(rewards, counted)
    count = segment_sum(ones, groups, num)
    mean = segment_sum(exact, groups, num) / count.clamp(min=1.0)
    centred = (exact - mean[groups]) * ones
    if normalize_by_std:
        variance = segment_sum(centred.square(), groups, num) / (count - 1).clamp(min=1.0)
        centred = centred / (variance.sqrt() + _EPSILON)[groups]
    return centred.where(differs(rewards, groups, counted), 0.0).to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, counted: Tensor | None = None) -> Tensor:
    """Compute r minus the mean of the group's other rewards: RLOO (arXiv 2402.14740). The result is
    0 for the only response of a group. Shapes as in `group_relative`: rewards [1, 0, 0, 0] give
    [1, -1/3, -1/3, -1/3].
    """
    num = len(rewards)
    exact, ones = _known(rewards, counted)
    count = segment_sum(ones, groups, num)[groups]
    others = (segment_sum(exact, groups, num)[groups] - exact) / (count - 1).clamp(min=1.0)
    made = (exact - others) * ones
    return made.where(differs(rewards, groups, counted), 0.0).to(rewards.dtype)


def differs(rewards: Tensor, groups: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return [S] bool, True for responses of groups whose counted rewards differ by more than the
    rounding of sums. Without a difference every advantage is zero, and the group adds nothing to
    the policy gradient: DAPO's dynamic sampling draws another prompt (arXiv 2503.14476).
    """
    rewards = rewards.double()
    known = torch.ones_like(groups, dtype=torch.bool) if counted is None else counted
    low, high = (
        torch.zeros_like(rewards).scatter_reduce(
            0, groups[known], rewards[known], how, include_self=False
        )
        for how in ("amin", "amax")
    )
    scale = torch.maximum(low.abs(), high.abs()).clamp(min=0.1)
    return (high - low > ROUNDING * scale)[groups]


def _known(rewards: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rewards (0 if not counted) and the counts (1 or 0), both [S] in float64."""
    exact = rewards.double()
    ones = torch.ones_like(exact) if counted is None else counted.double()
    return exact * ones, ones

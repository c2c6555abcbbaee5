"""REINFORCE++ (arXiv 2501.03262): no critic, and advantages are normalised over the whole step
and not within each group.
"""

from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs, advantage_estimator
from megavlm.algorithms.grpo import group_relative
from megavlm.algorithms.segments import discounted_sums
from megavlm.config.algorithm import GRPO


@advantage_estimator(whiten=True, within_groups=True, of_turns=True)
def reinforce_plus_plus(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Compute for each token [N] the sum of its sequence's rewards from there on, including the KL
    penalty. Whitening follows.
    """
    return discounted_sums(inputs.rewards.double(), inputs.sequence_ids, 1.0)


@advantage_estimator(whiten=True, needs_group=True, within_groups=True, of_turns=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Compute rewards minus the mean of their group, for each token [N]. Whitening follows."""
    made = group_relative(
        inputs.sequence_rewards,
        inputs.group_ids,
        normalize_by_std=False,
        counted=inputs.has_reward,
    )
    return made[inputs.sequence_ids]

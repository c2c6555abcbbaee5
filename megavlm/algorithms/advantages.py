"""Interface of advantage estimators.

An estimator is a function of (AdvantageInputs, the `algorithm` section) that returns the advantage
[N] of each token. Built-in ones are named in registry.py; a recipe names one of your own by import
path: `algorithm.advantage_estimator: my_package.module:function`. For example

    def centred(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
        rewards = inputs.sequence_rewards
        return (rewards - rewards[inputs.has_reward].mean())[inputs.sequence_ids]

Further parameters are options: `algorithm.options: {scale: 2.0}` is given to a function with a
parameter `scale`. `advantage_estimator` declares the properties of an estimator:

    @advantage_estimator(whiten=True, within_groups=True)
    def whitened(inputs: AdvantageInputs, settings: GRPO) -> Tensor: ...
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megavlm.algorithms.segments import segment_sum
from megavlm.config.algorithm import GRPO


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Rewards of a minibatch: N tokens of S sequences, grouped by prompt. Sequences and groups are
    complete, whatever packs and ranks hold their tokens.
    """

    rewards: Tensor
    """[N], each reward at the last token of the response or turn that earned it. With
    algorithm.kl_in=reward, the KL penalty of each token is subtracted."""

    sequence_ids: Tensor
    """[N] int64, the sequence of each token, in 0..S-1."""

    group_ids: Tensor
    """[S] int64, the group of each sequence, in 0..S-1; groups may differ in size."""

    has_reward: Tensor
    """[S] bool, False if the reward is not known. Such sequences are not trained on."""

    @property
    def sequence_rewards(self) -> Tensor:
        """Reward [S] of each sequence, summed in float64."""
        return segment_sum(self.rewards.double(), self.sequence_ids, len(self.group_ids))


EstimatorFunction = Callable[[AdvantageInputs, GRPO], Tensor]


@dataclass(frozen=True)
class Estimator:
    """Advantage estimator with the properties that the trainer needs to know.

    whiten: the trainer normalises its advantages over all tokens of the step (whitening.py).
    needs_group: it compares the responses to a prompt, so a single response has no advantage.
    within_groups: before any whitening, the advantages of a group depend on that group only, so
    that they can be computed before other groups are complete (rollout.streaming).
    of_turns: where only the last token of a turn has a reward, all tokens of the turn have one
    advantage. The trainer may then give it a single token for each part of a turn: each part has
    one reward and one advantage, shared by its tokens.
    """

    function: EstimatorFunction
    whiten: bool = False
    needs_group: bool = False
    within_groups: bool = False
    of_turns: bool = False

    def __call__(self, inputs: AdvantageInputs, settings: GRPO) -> Tensor:
        """Compute advantages [N] in the dtype of the rewards. Raises ValueError if the function
        returns another shape.
        """
        made = self.function(inputs, settings)
        if made.shape != inputs.rewards.shape:
            raise ValueError(
                f"algorithm.advantage_estimator={settings.advantage_estimator} returned advantages "
                f"of shape {list(made.shape)} for {list(inputs.rewards.shape)} tokens: return one "
                "for each token"
            )
        return made.to(inputs.rewards.dtype)


def advantage_estimator(
    *,
    whiten: bool = False,
    needs_group: bool = False,
    within_groups: bool = False,
    of_turns: bool = False,
) -> Callable[[EstimatorFunction], Estimator]:
    """Return a decorator that declares an estimator's properties."""
    return lambda function: Estimator(function, whiten, needs_group, within_groups, of_turns)

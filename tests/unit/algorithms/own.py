"""A user's advantage estimator and policy loss, named by import path."""

from dataclasses import replace

import torch
from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs, advantage_estimator
from megavlm.algorithms.clip import clip_ratio
from megavlm.algorithms.grpo import group_relative
from megavlm.algorithms.policy_loss import PolicyInputs, PolicyTerm, ratios
from megavlm.config.algorithm import GRPO, PolicyOptimization

NUMBER = 3


def grpo(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    rewards, groups = inputs.sequence_rewards, inputs.group_ids
    made = group_relative(
        rewards,
        groups,
        normalize_by_std=settings.normalize_by_std,
        counted=inputs.has_reward,
    )
    return made[inputs.sequence_ids]


@advantage_estimator(whiten=True, needs_group=True)
def baseline(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    made = group_relative(
        inputs.sequence_rewards,
        inputs.group_ids,
        normalize_by_std=False,
        counted=inputs.has_reward,
    )
    return made[inputs.sequence_ids]


def of_sequences(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Return a wrong shape: one number for each sequence."""
    return inputs.sequence_rewards


def clip(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    return clip_ratio(ratios(inputs.logprobs, inputs.old_logprobs), inputs.advantages, settings)


def plain(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    ratio = ratios(inputs.logprobs, inputs.old_logprobs)
    loss = -ratio * inputs.advantages
    return PolicyTerm.unclipped(loss, ratio, squared_ratio=ratio.detach().square())


def total(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Return a wrong shape: a sum."""
    ratio = ratios(inputs.logprobs, inputs.old_logprobs)
    return PolicyTerm.unclipped(-(ratio * inputs.advantages).sum(), ratio)


def three(inputs: PolicyInputs, settings: PolicyOptimization, temperature: float) -> PolicyTerm:
    made = clip(inputs, settings)
    return replace(made, metrics={"temperature": torch.full_like(made.loss, temperature)})


@advantage_estimator(whiten=True)
def scaled(inputs: AdvantageInputs, settings: GRPO, *, scale: float = 1.0) -> Tensor:
    return scale * inputs.rewards

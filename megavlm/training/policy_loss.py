"""The loss of a policy update over one pack, and the measures that it reports."""

from typing import Any

from torch import Tensor

from megavlm.algorithms.importance import mismatch, truncated_weights
from megavlm.algorithms.kl import estimator
from megavlm.algorithms.losses import clipped_policy_loss, entropy_bonus, negative_log_likelihood
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.passes import LossFunction


def policy_loss(settings: Any, num_targets: int) -> LossFunction:
    """GRPO's loss per token, averaged over the minibatch's `num_targets`. `settings`: the
    `algorithm` section.

    A pack's values: advantages, rollout_logprobs; old_logprobs unless this is the first update on
    its rollout, where the present log-probs are the old ones; reference_logprobs where the KL
    coefficient is not zero. Each [N].
    """
    kl = estimator(settings.kl_estimator)

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, values = scores.logprobs, pack.values
        old = values.get("old_logprobs", logprobs.detach())
        policy, clipped = clipped_policy_loss(
            logprobs, old, values["advantages"], settings.clip_low, settings.clip_high
        )
        loss = truncated_weights(old, values["rollout_logprobs"], settings.importance_cap) * policy
        engine_kl, engine_difference = mismatch(old, values["rollout_logprobs"])
        measures = {
            "tokens": logprobs.new_tensor(float(pack.num_targets)),
            "entropy": scores.entropy.detach().sum(),
            "clipped": clipped.float().sum(),
            "rollout_kl": engine_kl.sum(),
            "largest_rollout_difference": engine_difference,
        }
        if settings.kl_coefficient:
            reference_kl = kl(logprobs, values["reference_logprobs"])
            loss = loss + settings.kl_coefficient * reference_kl
            measures["kl_reference"] = reference_kl.detach().sum()
        if settings.entropy_coefficient:
            loss = loss + entropy_bonus(scores.entropy, settings.entropy_coefficient)
        total = loss.sum() / num_targets
        return total, measures | {"loss": loss.detach().sum()}

    return loss_function


def supervised_loss(num_targets: int) -> LossFunction:
    """Mean negative log-likelihood of the batch's `num_targets` answer tokens."""

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
        loss = negative_log_likelihood(scores.logprobs).sum()
        tokens = scores.logprobs.new_tensor(float(pack.num_targets))
        return loss / num_targets, {"tokens": tokens, "loss": loss.detach()}

    return loss_function

"""The losses of an update over one pack, and the measures that they report."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megavlm.algorithms import importance
from megavlm.algorithms.cispo import weighted_loss
from megavlm.algorithms.clip import clipped_loss
from megavlm.algorithms.gspo import sequence_loss
from megavlm.algorithms.kl import estimator
from megavlm.algorithms.losses import entropy_bonus, negative_log_likelihood
from megavlm.algorithms.ratios import PolicyTerm
from megavlm.algorithms.segments import Reduce, alone
from megavlm.config.algorithms import PolicyOptimization
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.forward_backward import LossFunction

Measures = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a policy's loss needs to know of the update that it is for.

    is_first: of its rollout, so that the present log-probs are those of the policy that sampled; of
    tokens that older weights sampled (`stale`) they are the policy's before this step's updates,
    and the importance weights correct for the rest of the way.
    has_moved: the policy is no longer the reference, so that their KL is more than rounding.
    reduce: sums over the context ranks that hold parts of the same pack.
    """

    kl_coefficient: float
    is_first: bool = True
    has_moved: bool = True
    reduce: Reduce = alone


def policy_loss(settings: PolicyOptimization, update: Update) -> LossFunction:
    """The policy's loss, a sum over tokens with the weights that hold its denominators.

    A pack's values, each [N]: weights, advantages, sequence, rollout_logprobs; old_logprobs, which
    the first update on a rollout puts there if there are none; reference_logprobs where the KL is
    in the loss; stale, 1 where older weights sampled, if there are such. Measures are sums over
    tokens, and `signal`: tokens with a gradient that is not rounding alone.
    """
    kl = estimator(settings.kl_estimator)
    kl_coefficient = update.kl_coefficient if settings.kl_in == "loss" else 0.0

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        logprobs, values = scores.logprobs, pack.values
        if settings.old_logprobs == "rollout":
            old = values["rollout_logprobs"]
        else:
            old = values.setdefault("old_logprobs", logprobs.detach())
        term = _policy_term(settings, logprobs, old, pack, update.reduce)
        correction, measures = _correction(settings, old, pack, update.reduce)
        loss = correction * term.loss
        signal = (correction * values["advantages"] != 0) & ~_stopped(settings, term)
        has_gap = settings.old_logprobs == "trainer" or update.is_first
        sampled = old if settings.old_logprobs == "trainer" else logprobs.detach()
        rollout = values["rollout_logprobs"]
        measures |= engine_gap(sampled, rollout, values.get("stale"), is_known=has_gap)
        measures |= {
            "tokens": logprobs.new_tensor(float(pack.num_targets)),
            "entropy": scores.entropy.detach().sum(),
            "ratio": term.ratio.sum(),
            "largest_ratio": _largest(term.ratio),
            "clipped": term.clipped.float().sum(),
            "clipped_low": term.low.float().sum(),
            "clipped_high": term.high.float().sum(),
            "clipped_dual": term.dual.float().sum(),
        }
        if "reference_logprobs" in values:
            reference_kl = kl(logprobs, values["reference_logprobs"], old)
            measures["kl_reference"] = reference_kl.detach().sum()
            if kl_coefficient:
                loss = loss + kl_coefficient * reference_kl
                signal |= torch.tensor(update.has_moved, device=signal.device)
        if settings.entropy_coefficient:
            loss = loss + entropy_bonus(scores.entropy, settings.entropy_coefficient)
            signal = torch.ones_like(signal)
        weights = values["weights"]
        total = (loss * weights).sum()
        signal &= weights != 0
        return total, measures | {"loss": total.detach(), "signal": signal.float().sum()}

    return loss_function


def supervised_loss(num_targets: int) -> LossFunction:
    """Mean negative log-likelihood of the batch's `num_targets` answer tokens."""

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        loss = negative_log_likelihood(scores.logprobs).sum()
        tokens = scores.logprobs.new_tensor(float(pack.num_targets))
        return loss / num_targets, {"tokens": tokens, "loss": loss.detach()}

    return loss_function


def _policy_term(
    settings: PolicyOptimization, logprobs: Tensor, old: Tensor, pack: Pack, reduce: Reduce
) -> PolicyTerm:
    advantages = pack.values["advantages"]
    low, high, dual = settings.clip_low, settings.clip_high, settings.dual_clip
    if settings.policy_loss == "cispo":
        return weighted_loss(logprobs, old, advantages, clip_low=low, clip_high=high)
    if settings.policy_loss == "clip":
        return clipped_loss(logprobs, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    ids, num = _sequences(pack)
    return sequence_loss(
        logprobs,
        old,
        advantages,
        ids,
        num,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        reduce=reduce,
    )


def _correction(
    settings: PolicyOptimization, old: Tensor, pack: Pack, reduce: Reduce
) -> tuple[Tensor, Measures]:
    """Each token's importance weight, 0 where its sequence is rejected."""
    rollout, (ids, num) = pack.values["rollout_logprobs"], _sequences(pack)
    weights = torch.ones_like(rollout)
    measures = {}
    if settings.importance != "none":
        if settings.importance == "token":
            ratios = importance.token_ratios(old, rollout)
        else:
            ratios = importance.sequence_ratios(old, rollout, ids, num, reduce)
        if settings.importance_mode == "truncate":
            weights = importance.truncated(ratios, settings.importance_cap)
        else:
            floor, cap = settings.importance_floor, settings.importance_cap
            weights = importance.masked(ratios, floor, cap)
        measures["corrected"] = (weights != ratios).float().sum()
    below, above = settings.reject_below, settings.reject_above
    if below is not None or above is not None:
        out = importance.rejected(old, rollout, ids, num, below=below, above=above, reduce=reduce)
        weights = weights.where(~out, 0.0)
        measures["rejected"] = out.float().sum()
    return weights, measures | {"importance": weights.sum()}


def engine_gap(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    stale: Tensor | None = None,
    *,
    is_known: bool = True,
) -> Measures:
    """How far rollout engine and trainer are apart. `is_known`: `logprobs` are those of the weights
    that sampled, but where `stale` is 1.
    """
    known = torch.ones_like(logprobs) if stale is None else 1 - stale
    logprobs = logprobs.where(known == 1, rollout_logprobs)
    if not is_known:
        logprobs, rollout_logprobs, known = logprobs[:0], rollout_logprobs[:0], known[:0]
    kl, largest = importance.mismatch(logprobs, rollout_logprobs)
    return {
        "engine_tokens": known.sum(),
        "rollout_train_kl": kl.sum(),
        "largest_rollout_difference": largest,
    }


def _sequences(pack: Pack) -> tuple[Tensor, int]:
    """Each token's sequence, and a bound on their number that needs no look at a tensor."""
    return pack.values["sequence"].long(), len(pack.parents)


def _stopped(settings: PolicyOptimization, term: PolicyTerm) -> Tensor:
    """Tokens whose gradient the clip takes away."""
    return torch.zeros_like(term.low) if settings.policy_loss == "cispo" else term.clipped


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())

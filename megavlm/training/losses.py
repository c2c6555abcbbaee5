"""Losses of policy and critic over one pack, and the measures that they report."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megavlm.algorithms import importance
from megavlm.algorithms.dpo import dpo
from megavlm.algorithms.kl import estimator
from megavlm.algorithms.policy_loss import PolicyInputs
from megavlm.algorithms.registry import load_policy_loss
from megavlm.algorithms.segments import Reduce, identity, segment_sum
from megavlm.algorithms.value_loss import value_loss
from megavlm.config.algorithm import DPO, PPO, PolicyOptimization
from megavlm.config.distillation import Distillation
from megavlm.data.packs.packing import Pack
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.forward_backward import LossFunction, Measures

NO_TEACHER = Distillation()
OF_TEACHER = "kl_teacher/"  # prefix of the divergence from one teacher
CUSTOM = "policy_loss/"  # prefix of the metrics that a policy loss adds


@dataclass(frozen=True, kw_only=True)
class Update:
    """Facts about the update that a policy loss is computed for.

    is_first: True for the first update on a rollout. The current log-probs are then the old ones,
    before this step's updates. They also belong to the weights that sampled, except for tokens from
    older weights (`is_stale`), which importance weights correct.

    has_moved: True if the policy differs from the reference, so that their KL is more than
    rounding.

    is_reference: True if the policy was the reference before this step's updates, so that both have
    the same log-probs.

    reduce: Sum over the context ranks that hold parts of the same pack.

    distillation: Settings of the KL divergence from the teachers. It counts if the columns have
    `teacher_logprobs` and `teacher_ids`.
    """

    kl_coefficient: float
    is_first: bool = True
    has_moved: bool = True
    is_reference: bool = False
    reduce: Reduce = identity
    distillation: Distillation = NO_TEACHER


def policy_loss(settings: PolicyOptimization, update: Update) -> LossFunction:
    """Return the policy's loss function: a sum over tokens, with loss weights that include the
    denominators.

    The packs need the column `advantages`, and `reference_logprobs` if the KL is in the loss. The
    first update on a rollout adds `old_logprobs` if they are missing, and `reference_logprobs`
    while the policy still is the reference. Measures are sums over tokens; `signal` counts the
    tokens whose gradient is more than rounding.
    """
    loss_of_tokens = load_policy_loss(settings)
    kl = estimator(settings.kl_estimator)
    kl_coefficient = update.kl_coefficient if settings.kl_in == "loss" else 0.0
    teacher_kl_of = estimator(update.distillation.kl_estimator)

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        logprobs, columns = scores.logprobs, pack.columns
        assert columns is not None and columns.advantages is not None
        advantages = columns.advantages
        if settings.old_logprobs == "rollout":
            old = columns.rollout_logprobs
        elif columns.old_logprobs is None:
            old = logprobs.detach()
            columns = replace(columns, old_logprobs=old)
        else:
            old = columns.old_logprobs
        if update.is_reference and columns.reference_logprobs is None:
            known = columns.old_logprobs
            start = logprobs.detach() if known is None else known
            columns = replace(columns, reference_logprobs=start)
        pack.columns = columns
        inputs = PolicyInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            sequence_ids=columns.sequence_ids,
            num_sequences=pack.num_sequences,
            reduce=update.reduce,
        )
        term = loss_of_tokens(inputs, settings)
        if term.loss.shape != logprobs.shape:
            raise ValueError(
                f"algorithm.policy_loss={settings.policy_loss} returned losses of shape "
                f"{list(term.loss.shape)} for {list(logprobs.shape)} tokens: return one for each"
            )
        correction, measures = _correction(
            settings, old, columns, pack.num_sequences, update.reduce
        )
        loss = correction * term.loss
        signal = (correction * advantages != 0) & ~term.stopped
        if columns.teacher_logprobs is not None:
            known = ~columns.teacher_logprobs.isnan()
            # At other tokens the divergence and its gradient are zero.
            if update.distillation.is_forward:
                divergence = torch.zeros_like(logprobs)
                if scores.divergence is not None:
                    divergence = scores.divergence
                teacher_kl = divergence.where(known, 0.0)
            else:
                teacher = columns.teacher_logprobs.where(known, logprobs.detach())
                teacher_kl = teacher_kl_of(logprobs, teacher, old)
            scale, of_teachers = _by_teacher(update.distillation, columns, teacher_kl.detach())
            loss = loss + scale * correction * teacher_kl
            measures |= {"kl_teacher": teacher_kl.detach().sum()} | of_teachers
            signal |= known & (correction != 0)
        has_gap = settings.old_logprobs == "trainer" or update.is_first
        sampled = old if settings.old_logprobs == "trainer" else logprobs.detach()
        measures |= engine_gap(sampled, columns, is_known=has_gap)
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
        for name, value in term.metrics.items():
            measures[f"{CUSTOM}{name}"] = value.detach().float().sum()
        if columns.reference_logprobs is not None:
            reference_kl = kl(logprobs, columns.reference_logprobs, old)
            measures["kl_reference"] = reference_kl.detach().sum()
            if kl_coefficient:
                loss = loss + kl_coefficient * reference_kl
                signal |= torch.tensor(update.has_moved, device=signal.device)
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * scores.entropy
            signal = torch.ones_like(signal)
        total = (loss * columns.loss_weights).sum()
        signal &= columns.loss_weights != 0
        return total, measures | {"loss": total.detach(), "signal": signal.float().sum()}

    return loss_function


def with_draft_loss(loss: LossFunction, num_targets: int | None = None) -> LossFunction:
    """Return a loss function that also teaches the draft head. Its divergence from the policy has
    the loss weights of the tokens or, with `num_targets`, is their mean over the batch.
    """

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        total, measures = loss(pack, scores)
        divergence = scores.draft_divergence
        assert divergence is not None
        if num_targets is None:
            assert pack.columns is not None
            own = (divergence * pack.columns.loss_weights).sum()
        else:
            own = divergence.sum() / num_targets
        return total + own, measures | {"draft_divergence": divergence.detach().sum()}

    return loss_function


def supervised_loss(num_targets: int) -> LossFunction:
    """Return the mean negative log-likelihood of the batch's `num_targets` answer tokens."""

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        loss = -scores.logprobs.sum()
        tokens = scores.logprobs.new_tensor(float(pack.num_targets))
        return loss / num_targets, {"tokens": tokens, "loss": loss.detach()}

    return loss_function


def preference_loss(settings: DPO, reduce: Reduce = identity) -> LossFunction:
    """Return the loss function of pairs of responses: the mean over the batch's pairs.

    The columns need `is_chosen`, and `reference_logprobs` unless there is no reference. A sequence
    is a pair, which no two packs share. reduce: Sum over the context ranks of a pack.

    Measures are sums over pairs. A pair's loss depends on all of its tokens, which may be on
    several context ranks; each rank adds the gradient of its own tokens and its share of the value.
    """

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        logprobs, columns = scores.logprobs, pack.columns
        assert columns is not None and columns.is_chosen is not None
        pairs, weights, num = columns.sequence_ids, columns.loss_weights, pack.num_sequences
        ratios = logprobs.detach()
        if columns.reference_logprobs is not None:
            ratios = ratios - columns.reference_logprobs
        parts = [response_sums(columns, x, num) for x in (ratios, torch.ones_like(ratios))]
        sums, lengths = reduce(torch.stack(parts))
        with torch.enable_grad():
            losses = dpo(sums.requires_grad_(), lengths, settings)
            (slopes,) = torch.autograd.grad(losses.sum(), sums)
        slope = slopes[0, pairs].where(columns.is_chosen, slopes[1, pairs])
        gradient = (slope * weights * (logprobs - logprobs.detach())).sum()
        shares = 1 / lengths.sum(0)[pairs]  # of each token in its pair
        chosen, rejected = settings.beta * sums.detach()[:, pairs]
        loss = (losses.detach()[pairs] * weights * shares).sum()
        if settings.sft_coefficient:
            of_chosen = columns.is_chosen / lengths[0, pairs] * settings.sft_coefficient
            likelihood = (logprobs * weights * of_chosen).sum()
            loss, gradient = loss - likelihood.detach(), gradient - likelihood + likelihood.detach()
        return (loss + gradient).to(logprobs.dtype), {
            "loss": loss,
            "tokens": logprobs.new_tensor(float(pack.num_targets)),
            "pairs": shares.sum(),
            "chosen_reward": (chosen * shares).sum(),
            "rejected_reward": (rejected * shares).sum(),
            "preferred": ((chosen > rejected) * shares).sum(),
        }

    return loss_function


def response_sums(columns: TargetColumns, values: Tensor, num: int) -> Tensor:
    """Return the sums [2, S] of `values` [N] over the chosen and the rejected response of each of
    `num` pairs, in float64.
    """
    assert columns.is_chosen is not None
    responses = columns.sequence_ids + num * (~columns.is_chosen).long()
    return segment_sum(values.double(), responses, 2 * num).view(2, num)


def _by_teacher(
    distillation: Distillation, columns: TargetColumns, divergences: Tensor
) -> tuple[Tensor, Measures]:
    """Return each token's coefficient [N] of its divergence from its teacher, and measures of each
    teacher: the sum of the divergences [N], and the number of tokens that it scored.
    """
    ids, logprobs = columns.teacher_ids, columns.teacher_logprobs
    assert ids is not None and logprobs is not None
    scale, measures = torch.zeros_like(divergences), {}
    for number, (name, teacher) in enumerate(distillation.teachers.items()):
        scored = (ids == number) & ~logprobs.isnan()
        scale = scale + distillation.coefficient * teacher.weight * scored
        measures[OF_TEACHER + name] = (divergences * scored).sum()
        measures[f"teacher_tokens/{name}"] = scored.float().sum()
    return scale, measures


def _correction(
    settings: PolicyOptimization,
    old: Tensor,
    columns: TargetColumns,
    num: int,
    reduce: Reduce,
) -> tuple[Tensor, Measures]:
    """Return each token's importance weight [n], 0 where its sequence is rejected, and measures.
    old: Log-probs [n] by the trainer before the update.
    """
    rollout, ids = columns.rollout_logprobs, columns.sequence_ids
    weights = torch.ones_like(rollout)
    measures = {}
    if settings.importance != "none":
        if settings.importance == "token":
            ratios = importance.token_ratios(old, rollout)
        else:
            ratios = importance.sequence_ratios(old, rollout, ids, num, reduce)
        floor, cap = settings.importance_floor, settings.importance_cap
        if floor is None:
            weights = importance.truncated(ratios, cap)
        else:
            weights = importance.masked(ratios, floor, cap)
        measures["corrected"] = (weights != ratios).float().sum()
    below, above = settings.reject_below, settings.reject_above
    if below is not None or above is not None:
        out = importance.rejected(old, rollout, ids, num, below=below, above=above, reduce=reduce)
        weights = weights.where(~out, 0.0)
        measures["rejected"] = out.float().sum()
    return weights, measures | {"importance": weights.sum()}


def engine_gap(logprobs: Tensor, columns: TargetColumns, *, is_known: bool = True) -> Measures:
    """Measure the difference between the log-probs of rollout engine and trainer. is_known: True if
    `logprobs` [N] belong to the weights that sampled, except where `is_stale`; False measures
    nothing.
    """
    if not is_known:
        logprobs, columns = logprobs[:0], columns.select(slice(0))
    rollout_logprobs = columns.rollout_logprobs
    logprobs = logprobs.where(~columns.is_stale, rollout_logprobs)
    kl, largest = importance.mismatch(logprobs, rollout_logprobs)
    return {
        "engine_tokens": (~columns.is_stale).float().sum(),
        "rollout_train_kl": kl.sum(),
        "largest_rollout_difference": largest,
    }


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())


def critic_loss(settings: PPO) -> LossFunction:
    """Return the loss function of a separate critic."""

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        return weighted_value_loss(settings, pack, scores)

    return loss_function


def with_value_loss(settings: PPO, policy: LossFunction, *, critic_alone: bool) -> LossFunction:
    """Return the loss function of a policy with a shared critic. critic_alone: If true, the
    policy's loss is still computed, but its gradient is exactly zero.
    """

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        policy_part, measures = policy(pack, scores)
        value_part, value_measures = weighted_value_loss(settings, pack, scores)
        policy_share = 0.0 if critic_alone else 1.0
        total = policy_share * policy_part + settings.value_coefficient * value_part
        signal = policy_share * measures["signal"] + value_measures["signal"]
        return total, measures | value_measures | {"loss": total.detach(), "signal": signal}

    return loss_function


def weighted_value_loss(settings: PPO, pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
    """Return the value loss [] of a pack with the policy's loss weights, and its measures. `signal`
    counts the tokens with a gradient.
    """
    columns = pack.columns
    assert columns is not None and columns.values is not None and columns.returns is not None
    loss, clipped = value_loss(scores.values, columns.values, columns.returns, settings.value_clip)
    total = (loss * columns.loss_weights).sum()
    counted = columns.loss_weights > 0
    # Other tokens become zeros; indexing by a mask would synchronize with the GPU.
    # In float64: variances are differences of these sums.
    values, returns = (x.double().where(counted, 0.0) for x in (columns.values, columns.returns))
    errors = returns - values
    return total, {
        "signal": (counted & ~clipped).float().sum(),
        "value_tokens": counted.float().sum(),
        "value_loss": total.detach(),
        "value_clipped": (clipped & counted).float().sum(),
        "values": values.sum(),
        "returns": returns.sum(),
        "returns_squared": returns.square().sum(),
        "errors": errors.sum(),
        "errors_squared": errors.square().sum(),
    }

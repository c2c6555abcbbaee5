"""Advantages of a step's tokens, made where log-probs and values are: on the last pipeline stage.

Under context parallelism a rank holds a part of a sequence; sums over sequences need all of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megavlm.algorithms import advantages as relative
from megavlm.algorithms import kl
from megavlm.algorithms.gae import gae, turn_gae
from megavlm.algorithms.reinforce import returns_to_go
from megavlm.algorithms.segments import Reduce, segment_sum
from megavlm.algorithms.whitening import whiten
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packing import Pack
from megavlm.data.targets import TargetColumns, concatenate


def add_advantages(
    packs: Sequence[Pack],
    settings: GRPO | PPO,
    *,
    kl_coefficient: float,
    over_context: Reduce,
    over_all: Reduce,
) -> None:
    """Add `advantages`, with a critic also `returns`, to the packs' columns, and renumber their
    sequences: from 0 within a pack, fewer than it has segments. Collective.

    packs: of all minibatches of the step, in the same order on every context rank. kl_coefficient:
    where the KL is in the reward; 0 elsewhere. `over_context` and `over_all` sum over the context
    ranks of a pack, and over all ranks that hold packs.
    """
    for pack in packs:
        columns = _whole(pack, over_context)
        columns = replace(columns, sequence_ids=_numbered(columns.sequence_ids))
        if kl_coefficient:
            rewards = columns.rewards - kl_coefficient * _kl(columns, settings)
            advantages, returns = _made(replace(columns, rewards=rewards), settings)
        else:
            advantages, returns = _made(columns, settings)
        columns = replace(columns, advantages=advantages, returns=returns)
        pack.columns = columns.select(pack.target_index)
    if _is_whitened(settings):
        columns = concatenate([pack.columns for pack in packs if pack.columns is not None])
        assert columns.advantages is not None
        whitened = whiten(columns.advantages, columns.loss_weights > 0, over_all)
        parts = whitened.split([pack.num_targets for pack in packs])
        for pack, part in zip(packs, parts, strict=True):
            assert pack.columns is not None
            pack.columns = replace(pack.columns, advantages=part)


def _made(columns: TargetColumns, settings: GRPO | PPO) -> tuple[Tensor, Tensor | None]:
    """Return advantages and, with a critic, returns."""
    rewards, ids = columns.rewards, columns.sequence_ids
    if isinstance(settings, PPO):
        assert columns.values is not None
        discounts = {"gamma": settings.gamma, "lam": settings.lam}
        if settings.gae_level == "token":
            return gae(rewards, columns.values, ids, **discounts)
        return turn_gae(rewards, columns.values, ids, columns.turn_ids, **discounts)
    if settings.advantage_estimator == "reinforce_plus_plus":
        return returns_to_go(rewards, ids), None
    num = int(ids.max()) + 1 if len(ids) else 0
    totals = segment_sum(rewards, ids, num)
    groups = _numbered(columns.group_ids)
    of_sequence = groups.new_zeros(num).index_put((ids,), groups)
    known = columns.has_reward.new_zeros(num).index_put((ids,), columns.has_reward)
    if settings.advantage_estimator == "rloo":
        made = relative.rloo(totals, of_sequence, known)
    else:
        by_std = settings.normalize_by_std and settings.advantage_estimator == "grpo"
        made = relative.grpo(totals, of_sequence, normalize_by_std=by_std, counted=known)
    return made[ids], None


def _is_whitened(settings: GRPO | PPO) -> bool:
    if isinstance(settings, PPO):
        return settings.normalize_advantages
    return settings.advantage_estimator.startswith("reinforce")


def _kl(columns: TargetColumns, settings: GRPO | PPO) -> Tensor:
    """Return the KL [N] of the policy that sampled, by the log-probs that stand for it."""
    sampled = settings.old_logprobs == "rollout"
    logprobs = columns.rollout_logprobs if sampled else columns.old_logprobs
    assert logprobs is not None and columns.reference_logprobs is not None
    return kl.estimator(settings.kl_estimator)(logprobs, columns.reference_logprobs, logprobs)


def _whole(pack: Pack, over_context: Reduce) -> TargetColumns:
    """Return the columns of all N targets of a pack, of which this rank holds n. Collective."""
    assert pack.columns is not None
    if pack.context_size == 1:
        return pack.columns
    present = pack.columns.present()
    held = torch.stack([column.double() for column in present.values()])  # exact for every dtype
    num = int(over_context(held.new_tensor(float(pack.num_targets))))
    whole = held.new_zeros(len(held), num)
    whole[:, pack.target_index] = held
    rows = zip(present.items(), over_context(whole), strict=True)
    return TargetColumns(**{name: row.to(column.dtype) for (name, column), row in rows})


def _numbered(ids: Tensor) -> Tensor:
    """Return ids renumbered from 0 without gaps, in their order."""
    return ids.unique(return_inverse=True)[1]

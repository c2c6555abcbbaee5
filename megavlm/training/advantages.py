"""Advantages of a step's tokens, made where log-probs and values are: on the last pipeline stage.

Under context parallelism a rank holds a part of a sequence; sums over sequences need all of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megavlm.algorithms import kl
from megavlm.algorithms.advantages import AdvantageInputs, Estimator
from megavlm.algorithms.gae import gae, turn_gae
from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.algorithms.segments import Reduce
from megavlm.algorithms.whitening import whiten
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packing import Pack
from megavlm.data.targets import TargetColumns


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
    estimator: Estimator | None = None
    if isinstance(settings, GRPO):
        estimator = load_advantage_estimator(settings.advantage_estimator)
        is_whitened = estimator.whiten
    else:
        is_whitened = settings.normalize_advantages
    for pack in packs:
        columns = _whole(pack, over_context)
        columns = replace(columns, sequence_ids=_numbered(columns.sequence_ids))
        if kl_coefficient:
            rewards = columns.rewards - kl_coefficient * _kl(columns, settings)
        else:
            rewards = columns.rewards
        if isinstance(settings, PPO):
            advantages, returns = _gae(rewards, columns, settings)
            columns = replace(columns, advantages=advantages, returns=returns)
        else:
            assert estimator is not None
            advantages = estimator(_inputs(rewards, columns), settings)
            columns = replace(columns, advantages=advantages)
        pack.columns = columns.select(pack.target_index)
    if is_whitened:
        # Only these columns: minibatches after the first have old log-probs besides.
        made = [pack.columns for pack in packs if pack.columns is not None]
        advantages = torch.cat([c.advantages for c in made if c.advantages is not None])
        counted = torch.cat([c.loss_weights for c in made]) > 0
        parts = whiten(advantages, counted, over_all).split([pack.num_targets for pack in packs])
        for pack, part in zip(packs, parts, strict=True):
            assert pack.columns is not None
            pack.columns = replace(pack.columns, advantages=part)


def _gae(rewards: Tensor, columns: TargetColumns, settings: PPO) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, each [N]."""
    ids, values = columns.sequence_ids, columns.values
    assert values is not None
    if settings.gae_level == "token":
        return gae(rewards, values, ids, gamma=settings.gamma, lam=settings.lam)
    turns = columns.turn_ids
    return turn_gae(rewards, values, ids, turns, gamma=settings.gamma, lam=settings.lam)


def _inputs(rewards: Tensor, columns: TargetColumns) -> AdvantageInputs:
    ids = columns.sequence_ids
    num = int(ids.max()) + 1 if len(ids) else 0
    groups = _numbered(columns.group_ids)
    return AdvantageInputs(
        rewards=rewards,
        sequence_ids=ids,
        group_ids=groups.new_zeros(num).index_put((ids,), groups),
        has_reward=columns.has_reward.new_zeros(num).index_put((ids,), columns.has_reward),
    )


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

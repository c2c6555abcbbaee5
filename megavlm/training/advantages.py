"""Advantages of a step's tokens.

GRPO compares the responses of a group, and these may end up in several packs, so the driver
computes its advantages before trees are cut into packs. With the KL in the reward, GRPO needs
log-probs first, and each rank computes the advantages of whole minibatches. PPO needs one sequence
at a time, so its advantages are computed on the rank that has the sequence's values. Under context
parallelism a rank holds only part of a sequence; sums over sequences are gathered from all context
ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megavlm.algorithms import kl
from megavlm.algorithms.advantages import AdvantageInputs, Estimator
from megavlm.algorithms.gae import gae, turn_gae
from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.algorithms.segments import Reduce
from megavlm.algorithms.whitening import whiten
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packs.packing import Pack
from megavlm.data.packs.target_tokens import TargetColumns, concatenate
from megavlm.data.packs.trees import Tree


def with_advantages(minibatches: Sequence[Sequence[Tree]], settings: GRPO) -> list[list[Tree]]:
    """Return the trees of a streamed batch's minibatches with `advantages` in their columns. The KL
    in the reward is not included: with kl_in=reward the columns also get `rows`, which
    `add_kl_advantages` uses later. Neither is the normalisation over the step of
    `whiten_advantages`. Driver only.
    """
    estimator = load_advantage_estimator(settings)
    tables = [
        [segment.columns for tree in trees for segment in tree.segments if segment.columns]
        for trees in minibatches
        if trees  # a streamed batch may have none of a minibatch
    ]
    values = chain.from_iterable(_of_segments(estimator, table, settings) for table in tables)
    result = []
    for trees in minibatches:
        parts, num = [], 0
        for tree in trees:
            segments = []
            for segment in tree.segments:
                if segment.columns is not None:
                    end = num + len(segment.token_ids)
                    rows = torch.arange(num, end) if settings.kl_in == "reward" else None
                    columns = replace(segment.columns, advantages=next(values), rows=rows)
                    segment, num = replace(segment, columns=columns), end
                segments.append(segment)
            parts.append(Tree(tuple(segments)))
        result.append(parts)
    return result


def _of_segments(
    estimator: Estimator, table: Sequence[TargetColumns], settings: GRPO
) -> list[Tensor]:
    """Return the advantages of a minibatch's segments. table: Columns of the segments; only the
    last token of a turn has a reward. The tokens of a segment share one value if the estimator
    gives them one.
    """
    rows = slice(-1, None) if estimator.of_turns else slice(None)
    made = estimator(_inputs(table, rows), settings)
    sizes = [len(columns.rewards) for columns in table]
    if not estimator.of_turns:
        return list(made.split(sizes))
    return [value.expand(size) for value, size in zip(made.unbind(), sizes, strict=True)]


def add_kl_advantages(
    minibatches: Sequence[Sequence[Pack]],
    num_targets: Sequence[int],
    settings: GRPO,
    *,
    kl_coefficient: float,
    over_all: Reduce,
) -> None:
    """Recompute the packs' `advantages` with the KL in the reward. Collective.

    num_targets: Target tokens of each minibatch, on all ranks together. over_all: Sum over all
    ranks that hold packs.
    """
    estimator = load_advantage_estimator(settings)
    for packs, num in zip(minibatches, num_targets, strict=True):
        if not packs:
            continue
        held = concatenate([pack.columns for pack in packs if pack.columns is not None])
        assert held.rows is not None
        rewards = held.rewards - kl_coefficient * _kl(held, settings)
        table = _scattered(replace(held, rewards=rewards), held.rows, num, over_all)
        advantages = estimator(_inputs([table]), settings)
        for pack in packs:
            assert pack.columns is not None and pack.columns.rows is not None
            pack.columns = replace(pack.columns, advantages=advantages[pack.columns.rows])


def add_value_advantages(
    packs: Sequence[Pack],
    settings: PPO,
    *,
    kl_coefficient: float,
    over_context: Reduce,
) -> None:
    """Add `advantages` and `returns` to the packs' columns. Collective.

    packs: The packs of all minibatches of the step, in the same order on every context rank.
    kl_coefficient: Weight of the KL in the reward; 0 leaves the KL out. over_context: Sum over the
    context ranks of a pack.
    """
    for pack in packs:
        columns = _whole(pack, over_context)
        rewards = columns.rewards
        if kl_coefficient:
            rewards = rewards - kl_coefficient * _kl(columns, settings)
        advantages, returns = _gae(rewards, columns, settings)
        columns = replace(columns, advantages=advantages, returns=returns)
        pack.columns = columns.select(pack.target_index)


def whiten_advantages(packs: Sequence[Pack], *, over_all: Reduce) -> None:
    """Normalise the advantages of all packs of a step. over_all: Sum over all ranks that hold
    packs. Collective.
    """
    # Whiten these columns only. Packs cannot be concatenated as a whole, because old_logprobs is
    # set only after the first minibatch.
    made = [pack.columns for pack in packs if pack.columns is not None]
    advantages = torch.cat([c.advantages for c in made if c.advantages is not None])
    counted = torch.cat([c.loss_weights for c in made]) > 0
    parts = whiten(advantages, counted, over_all).split([pack.num_targets for pack in packs])
    for pack, part in zip(packs, parts, strict=True):
        assert pack.columns is not None
        pack.columns = replace(pack.columns, advantages=part)


def _inputs(tables: Sequence[TargetColumns], rows: slice = slice(None)) -> AdvantageInputs:
    """Return the inputs of an estimator. rows: The rows of each table that it gets."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(table, name)[rows] for table in tables])

    ids = joined("sequence_ids")
    num = int(ids.max()) + 1 if len(ids) else 0
    groups, has_reward = joined("group_ids"), joined("has_reward")
    return AdvantageInputs(
        rewards=joined("rewards"),
        sequence_ids=ids,
        group_ids=groups.new_zeros(num).index_put((ids,), groups),
        has_reward=has_reward.new_zeros(num).index_put((ids,), has_reward),
    )


def _gae(rewards: Tensor, columns: TargetColumns, settings: PPO) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, each [N]."""
    ids, values = columns.sequence_ids, columns.values
    assert values is not None
    if settings.gae_level == "token":
        return gae(rewards, values, ids, gamma=settings.gamma, lam=settings.lam)
    turns = columns.turn_ids
    return turn_gae(rewards, values, ids, turns, gamma=settings.gamma, lam=settings.lam)


def _kl(columns: TargetColumns, settings: GRPO | PPO) -> Tensor:
    """Return the KL [N] between the sampling policy and the reference. The sampling policy's
    log-probs are the rollout's or the recomputed old ones, as `old_logprobs` says.
    """
    sampled = settings.old_logprobs == "rollout"
    logprobs = columns.rollout_logprobs if sampled else columns.old_logprobs
    assert logprobs is not None and columns.reference_logprobs is not None
    return kl.estimator(settings.kl_estimator)(logprobs, columns.reference_logprobs, logprobs)


def _whole(pack: Pack, over_context: Reduce) -> TargetColumns:
    """Gather the columns of all targets of a pack from its context ranks. Collective."""
    assert pack.columns is not None
    if pack.context_size == 1:
        return pack.columns
    num = int(over_context(pack.columns.rewards.new_tensor(float(pack.num_targets))))
    return _scattered(pack.columns, pack.target_index, num, over_context)


def _scattered(
    columns: TargetColumns, index: Tensor, num: int, over_ranks: Reduce
) -> TargetColumns:
    """Gather a table of `num` rows from ranks that each hold some of them. index: [n] int64, the
    row in the whole table of each row of this rank. Collective.
    """
    present = columns.present()
    held = torch.stack([column.double() for column in present.values()])  # exact for each dtype
    whole = held.new_zeros(len(held), num)
    whole[:, index] = held
    rows = zip(present.items(), over_ranks(whole), strict=True)
    return TargetColumns(**{name: row.to(column.dtype) for (name, column), row in rows})

"""Advantages of a step's tokens, made where log-probs and values are: on the last pipeline stage.

A pack's values (`groups.policy_trees`): `rewards`, at the last token of what earned them;
`sequence`, `group` and `turn`, numbers of what a token belongs to; `counted`, 0 for sequences
whose reward is not known; `weights`. Under context
parallelism a rank holds a part of a sequence; sums over sequences need all of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megavlm.algorithms import advantages as relative
from megavlm.algorithms import kl
from megavlm.algorithms.gae import gae, turn_gae
from megavlm.algorithms.reinforce import returns_to_go
from megavlm.algorithms.segments import Reduce, segment_sum
from megavlm.algorithms.whitening import whiten
from megavlm.config.algorithms import GRPO, PPO
from megavlm.data.packing import Pack


def add_advantages(
    packs: Sequence[Pack],
    settings: GRPO | PPO,
    *,
    kl_coefficient: float,
    over_context: Reduce,
    over_all: Reduce,
) -> None:
    """Puts `advantages`, with a critic also `returns`, into the packs' values, and numbers their
    sequences anew: 0.. within a pack, fewer than it has segments.

    packs: of all minibatches of the step, in the same order on every context rank. kl_coefficient:
    where the KL is in the reward; 0 elsewhere. `over_context` and `over_all` sum over the context
    ranks of a pack, and over all ranks that hold packs.
    """
    for pack in packs:
        columns = _whole(pack, over_context)
        columns["sequence"] = _numbered(columns["sequence"])
        if kl_coefficient:
            columns["rewards"] = columns["rewards"] - kl_coefficient * _kl(columns, settings)
        made = _made(columns, settings) | {"sequence": columns["sequence"].float()}
        pack.values.update({name: column[pack.target_index] for name, column in made.items()})
    if _is_whitened(settings):
        values = torch.cat([pack.values["advantages"] for pack in packs])
        counted = torch.cat([pack.values["weights"] for pack in packs]) > 0
        parts = whiten(values, counted, over_all).split([pack.num_targets for pack in packs])
        for pack, part in zip(packs, parts, strict=True):
            pack.values["advantages"] = part


def _made(columns: dict[str, Tensor], settings: GRPO | PPO) -> dict[str, Tensor]:
    rewards, ids = columns["rewards"], columns["sequence"]
    if isinstance(settings, PPO):
        discounts = {"gamma": settings.gamma, "lam": settings.lam}
        if settings.gae_level == "token":
            made, returns = gae(rewards, columns["values"], ids, **discounts)
        else:
            turns = columns["turn"].long()
            made, returns = turn_gae(rewards, columns["values"], ids, turns, **discounts)
        return {"advantages": made, "returns": returns}
    if settings.advantage_estimator == "reinforce_plus_plus":
        return {"advantages": returns_to_go(rewards, ids)}
    num = int(ids.max()) + 1 if len(ids) else 0
    totals = segment_sum(rewards, ids, num)
    groups = _numbered(columns["group"])
    of_sequence = groups.new_zeros(num).index_put((ids,), groups)
    known = columns["counted"].new_zeros(num).index_put((ids,), columns["counted"]) > 0
    if settings.advantage_estimator == "rloo":
        made = relative.rloo(totals, of_sequence, known)
    else:
        by_std = settings.normalize_by_std and settings.advantage_estimator == "grpo"
        made = relative.grpo(totals, of_sequence, normalize_by_std=by_std, counted=known)
    return {"advantages": made[ids]}


def _is_whitened(settings: GRPO | PPO) -> bool:
    if isinstance(settings, PPO):
        return settings.normalize_advantages
    return settings.advantage_estimator.startswith("reinforce")


def _kl(columns: dict[str, Tensor], settings: GRPO | PPO) -> Tensor:
    """Of the policy that sampled, by the log-probs that stand for it."""
    sampled = "rollout_logprobs" if settings.old_logprobs == "rollout" else "old_logprobs"
    logprobs = columns[sampled]
    return kl.estimator(settings.kl_estimator)(logprobs, columns["reference_logprobs"], logprobs)


def _whole(pack: Pack, over_context: Reduce) -> dict[str, Tensor]:
    """The values of all N targets of a pack, of which this rank holds n."""
    names = sorted(pack.values)
    held = torch.stack([pack.values[name] for name in names])
    if pack.context_size == 1:
        return dict(zip(names, held, strict=True))
    num = int(over_context(held.new_tensor(float(pack.num_targets))))
    whole = held.new_zeros(len(names), num)
    whole[:, pack.target_index] = held
    return dict(zip(names, over_context(whole), strict=True))


def _numbered(column: Tensor) -> Tensor:
    """The same numbers for the same values, from 0 without gaps."""
    return column.unique(return_inverse=True)[1]

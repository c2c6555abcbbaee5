"""Per-token data of the tokens that a policy is trained on: rewards, log-probs and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetColumns:
    """Columns of a table with one row per target token: every field is a tensor [N].

    The rollout (rollout/groups.py), or a pair of responses in the data (packs/trees.py), writes
    the fields without a default. The other fields are added by `dataclasses.replace`, on the last
    pipeline stage if they need a pass of a model. They are None until then, and always if the
    algorithm does not use them.

    Example, responses of 2 and 3 tokens to one prompt, with rewards 1 and 0:
        rewards      [0.0, 1.0, 0.0, 0.0, 0.0]
        sequence_ids [0, 0, 1, 1, 1]
        group_ids    [0, 0, 0, 0, 0]
        turn_ids     [0, 0, 0, 0, 0]
        loss_weights [0.2, 0.2, 0.2, 0.2, 0.2]  # token_mean
        advantages   [0.71, 0.71, -0.71, -0.71, -0.71]  # grpo
    """

    rewards: Tensor
    """float32. Reward at the last token of each turn, 0 elsewhere. Read by the advantages."""
    rollout_logprobs: Tensor
    """float32, nats. Log-probs by the rollout engine. Read by the importance weights and, with
    algorithm.old_logprobs=rollout, by the loss.
    """
    loss_weights: Tensor
    """float32. Weight of the token in the loss, including the loss's denominator. A token of weight
    0 is not trained on.
    """
    sequence_ids: Tensor
    """int64. Number of the token's episode in its minibatch. Read by the losses per sequence."""
    group_ids: Tensor
    """int64. Number of the token's group in its minibatch. A group is the episodes of one prompt;
    they may be in several packs. Read by the advantages.
    """
    turn_ids: Tensor
    """int64. Number of the token's turn in its episode, from 0. Read by GAE over turns."""
    has_reward: Tensor
    """bool. False if the reward of the episode failed and is skipped. Read by the advantages."""
    is_stale: Tensor
    """bool. True if the token was sampled with older weights than the current ones. Read by the
    metrics that compare rollout engine and trainer.
    """
    rows: Tensor | None = None
    """int64. Place of the token among all tokens of its minibatch, episode by episode. Read by the
    advantages with the KL in the reward, which are computed over the whole minibatch.
    """
    old_logprobs: Tensor | None = None
    """float32, nats. Log-probs by the trainer before the step's updates, from a separate pass or
    from the first update. Read by the loss and by the KL in the reward.
    """
    reference_logprobs: Tensor | None = None
    """float32, nats. Log-probs by the reference model. Read by the KL in the loss or the reward,
    and by the loss of pairs, which needs their sums: they may be the response's mean, in float64.
    """
    teacher_logprobs: Tensor | None = None
    """float32, nats. Log-probs by a teacher, NaN where it gave none. Written by the rollout, read
    by the loss.
    """
    teacher_ids: Tensor | None = None
    """int64. Number of the token's teacher in distillation.teachers, -1 for none. Read by the
    loss.
    """
    values: Tensor | None = None
    """float32. The critic's values before the step's updates. Read by GAE and the value loss."""
    advantages: Tensor | None = None
    """float32. Written by training/advantages.py, read by the policy's loss."""
    returns: Tensor | None = None
    """float32. Targets of the critic: advantages plus values. Written with a critic only."""
    is_chosen: Tensor | None = None
    """bool. True if the token is of the preferred response of its pair, which is its sequence. Read
    by the loss of pairs.
    """

    def __post_init__(self) -> None:
        for name, column in self.present().items():
            assert column.shape == self.rewards.shape, f"{name}: one value per target token"

    def present(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        return {name: column for name, column in vars(self).items() if column is not None}

    def select(self, index: Tensor | slice) -> "TargetColumns":
        """Return the rows that `index` selects: a slice, or int64 positions [n]."""
        return replace(self, **{name: column[index] for name, column in self.present().items()})

    def to(self, device: torch.device | str) -> "TargetColumns":
        """Return the same columns on `device`."""
        return replace(self, **{name: column.to(device) for name, column in self.present().items()})


def concatenate(parts: Sequence[TargetColumns]) -> TargetColumns:
    """Return the rows of all parts, in their order. All parts must have the same fields."""
    columns = [part.present() for part in parts]
    names = columns[0].keys()
    assert all(part.keys() == names for part in columns), "all targets have the same columns"
    return TargetColumns(**{name: torch.cat([part[name] for part in columns]) for name in names})

"""Columns of target tokens with made-up values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.rollout.trajectory import Group


def of_calls(group: Group, tables: Sequence[TargetColumns]) -> list[TargetColumns]:
    """Cut the columns of each episode's tokens into those of its calls."""
    parts = []
    for episode, table in zip(group.episodes, tables, strict=True):
        start = 0
        for response in episode.responses:
            end = start + len(response.token_ids)
            parts.append(table.select(slice(start, end)))
            start = end
    return parts


def columns(length: int, **given: Tensor) -> TargetColumns:
    """Return columns of one sequence: zeros, where nothing else is given. The tokens share values
    as those of rollout/groups.py do.
    """
    zeros, ids = torch.zeros(length), torch.tensor(0).expand(length)
    defaults = {
        "rewards": zeros,
        "rollout_logprobs": zeros,
        "loss_weights": torch.tensor(0.0).expand(length),
        "sequence_ids": ids,
        "group_ids": ids,
        "turn_ids": ids,
        "has_reward": torch.tensor(True).expand(length),
        "is_stale": torch.tensor(False).expand(length),
    }
    return TargetColumns(**(defaults | given))

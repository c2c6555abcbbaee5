"""Columns of target tokens with made-up values."""

import torch
from torch import Tensor

from megavlm.data.target_tokens import TargetColumns


def columns(length: int, **given: Tensor) -> TargetColumns:
    """Return columns of one sequence: zeros, where nothing else is given."""
    zeros, ids = torch.zeros(length), torch.zeros(length, dtype=torch.long)
    flags = torch.zeros(length, dtype=torch.bool)
    defaults = {
        "rewards": zeros,
        "rollout_logprobs": zeros,
        "loss_weights": zeros,
        "sequence_ids": ids,
        "group_ids": ids,
        "turn_ids": ids,
        "has_reward": ~flags,
        "is_stale": flags,
    }
    return TargetColumns(**(defaults | given))

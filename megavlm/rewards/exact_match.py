"""Reward 1 for a response that equals the answer. For short closed answers ("red", "3")."""

from collections.abc import Mapping
from typing import Any

from megavlm.rewards.base import Score


def score(response: str, row: Mapping[str, Any]) -> Score:
    """Reward 1 if both are equal after white space around them is removed, otherwise 0."""
    correct = response.strip() == row["answer"].strip()
    return Score(reward=float(correct), correct=correct)

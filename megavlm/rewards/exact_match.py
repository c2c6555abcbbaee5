"""Reward 1 for a response that equals the answer. For short closed answers ("red", "3")."""

from collections.abc import Mapping
from typing import Any

from megavlm.rewards.base import Score


def score(response: str, answer: str) -> Score:
    """Reward 1 if both are equal after white space around them is removed, otherwise 0."""
    correct = response.strip() == answer.strip()
    return Score(reward=float(correct), correct=correct)


def of_row(response: str, row: Mapping[str, Any]) -> Score:
    return score(response, row["answer"])

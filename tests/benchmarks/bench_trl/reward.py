"""Reward of both trainers: the share of the letter e in a response, which differs in a group."""

from collections.abc import Mapping
from typing import Any


def score(response: str, row: Mapping[str, Any]) -> float:
    return response.count("e") / max(len(response), 1)

"""The reward 0, for environments that give all rewards themselves."""

from collections.abc import Mapping
from typing import Any


def of_row(response: str, row: Mapping[str, Any]) -> float:
    """Return 0."""
    return 0.0

"""Checks of the options of built-in rewards; each raises ValueError with one sentence."""

import math
from collections.abc import Collection, Mapping
from typing import Any


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Check that a value is a finite number within bounds, and neither text nor bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and least <= value <= most and value > above):
        limits = (("at least", least), ("above", above), ("at most", most))
        bounds = [f" {word} {limit:g}" for word, limit in limits if math.isfinite(limit)]
        raise ValueError(f"{name} is {value!r}: set it to a number{' and'.join(bounds)}")


def check_weights(reward: str, weights: Any, known: Collection[str]) -> None:
    """Check weights: numbers by name, none below 0 and at least one above 0. None means the
    reward's default.
    """
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise ValueError(f"{reward}'s weights are {weights!r}: give NAME: NUMBER for each")
    if unknown := sorted(str(name) for name in weights if name not in known):
        raise ValueError(f"{reward} has no component {unknown[0]!r}: choose of {', '.join(known)}")
    for name, weight in weights.items():
        check_number(f"{reward}'s weight of {name}", weight, least=0)
    if not any(weights.values()):
        raise ValueError(f"{reward}'s weights are all 0: raise one of {', '.join(known)}")

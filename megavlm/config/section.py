"""Base class of the configuration's sections, and fields for numbers with a default and a range."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

MISSING: Any = "???"  # OmegaConf's marker for a required key
MOST = 10**9  # upper bound of whole numbers without another one: anything above is a typing error


class Section:
    """Base of the sections, each a frozen dataclass whose keys are documented under their field."""

    def check(self) -> None:
        """Raise ValueError for the first broken rule between keys of this section.

        The message is one sentence that names the key, its value, the rule and how to fix it.
        Ranges of single keys are declared by `bounded`; rules between sections are in
        cross_rules.py.
        """


@dataclass(frozen=True)
class Bounds:
    """Range of a number; None sets no bound on that side."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return True if the value is in range. NaN and the infinities never are."""
        return (
            -math.inf < value < math.inf
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
        given = ((words[name], getattr(self, name)) for name in words)
        return " and ".join(f"{word} {limit}" for word, limit in given if limit is not None)


def bounded(default: Any, **limits: float) -> Any:
    """Return a dataclass field whose number, or each number of its tuple, must obey `limits`."""
    return field(default=default, metadata={"bounds": Bounds(**limits)})


def follows(default: Any, **limits: float) -> Any:
    """Return a field that is null in recipes unless they set it. A null value is derived from other
    keys by a rule in cross_rules.py.

    default: The value in a section that is created without a recipe.
    """
    bounds = {"bounds": Bounds(**limits)} if limits else {}
    return field(default=default, metadata={"follows": True, **bounds})


def out_of_range(section: Section) -> Iterator[tuple[str, Any, Bounds]]:
    """Yield (key, value, bounds) of each number outside its range. None is in range."""
    values: Any = section  # every section is a dataclass
    for item in fields(values):
        bounds = item.metadata.get("bounds")
        value = getattr(section, item.name)
        if bounds is None or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if bounds.most is None and all(type(number) is int for number in numbers):
            bounds = replace(bounds, most=MOST)
        if not all(bounds.holds(number) for number in numbers):
            yield item.name, value, bounds

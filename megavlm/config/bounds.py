"""The range of a number, kept beside its default in the dataclass field."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Bounds:
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """False for NaN and the infinities too: no key means them."""
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
    """A dataclass field whose number, or each number of its tuple, is within `limits`."""
    return field(default=default, metadata={"bounds": Bounds(**limits)})


def out_of_range(section: Any) -> Iterator[tuple[str, Any, Bounds]]:
    """(key, value, bounds) of each number of a section outside its range. None is in range."""
    for item in fields(section):
        bounds = item.metadata.get("bounds")
        value = getattr(section, item.name)
        if bounds is None or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(bounds.holds(number) for number in numbers):
            yield item.name, value, bounds

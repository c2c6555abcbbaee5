"""The form of the examples that the demo draws, and their colours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 180, 40),
    "blue": (30, 60, 230),
    "yellow": (235, 215, 20),
    "black": (10, 10, 10),
    "purple": (150, 30, 180),
}

T = TypeVar("T")


@dataclass(frozen=True)
class DrawnExample:
    """A question about an image. `candidates`: all or some of the answers that its form allows.
    `columns`: further columns of its row. `lessons`: rows of the warm start, with chats, in place
    of the caption and the question with a random answer.
    """

    png: bytes
    question: str
    answer: str
    candidates: tuple[str, ...]
    caption: str
    task: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    lessons: Sequence[Mapping[str, Any]] = ()


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]

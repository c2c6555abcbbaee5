"""What reward functions get and return, and how they fail.

A reward is a function

    score(response: str, row: Mapping[str, Any], [images: Sequence[bytes],] **options)

of a response, the row's columns (problem, answer, category and those of data.extra_keys) and, where
it asks for them, the row's images as they are stored. It returns a number, or a mapping (a Score
as well) with `reward` and, if it can tell, `correct` and `parts`. A number alone is correct from 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FailureKind = Literal["timeout", "memory", "output", "exception", "value", "crash", "remote"]


@dataclass(frozen=True)
class Example:
    """A row as rewards and environments see it. `images`: encoded files. `chat`: role and content
    of the messages where the prompt is more than the user's `problem`.
    """

    problem: str
    answer: str
    category: str = ""
    images: tuple[bytes, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    chat: tuple[Mapping[str, str], ...] = ()

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        return self.chat or ({"role": "user", "content": self.problem},)

    def columns(self) -> dict[str, Any]:
        plain = {"problem": self.problem, "answer": self.answer, "category": self.category}
        return {**self.extra, **plain}


@dataclass(frozen=True)
class Score:
    """reward: what training maximises. correct: whether the answer is right (for accuracy). parts:
    what the reward is made of, by name, before weights. failure: the kind, where it could not be
    computed and stands for what reward.on_failure says; skipped: it is not trained on.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    skipped: bool = False


def check_answer(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a row without an answer, by which no response can be right."""
    if not str(row.get("answer", "")).strip():
        raise ValueError(
            "the row has no answer that a response is compared with: name its column in "
            "data.answer_key, or take another reward"
        )


class RewardFailure(Exception):
    """A reward that was not computed: a limit, an exception, no number."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class RewardStop(RuntimeError):
    """A reward failed where reward.on_failure=stop."""

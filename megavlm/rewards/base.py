"""Interface of reward functions: arguments, return value and failures.

A reward is a function

    score(response: str, row: Mapping[str, Any], [images: Sequence[bytes],] **options)

of a response, the row's columns (problem, answer, category and the columns in data.extra_keys) and,
if it has that parameter, the row's images as encoded files. It returns a number, or a mapping or
Score with `reward` and optionally `correct` and `parts`. If it returns only a number, a response is
correct from 1 upwards. The function may be async.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """Row as rewards and environments see it. images: encoded files. chat: messages with role,
    content and other keys, if the prompt consists of more than the user's `problem`.
    """

    problem: str
    answer: str
    category: str = ""
    images: tuple[bytes, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    chat: tuple[Mapping[str, Any], ...] = ()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return self.chat or ({"role": "user", "content": self.problem},)

    def columns(self) -> dict[str, Any]:
        plain = {"problem": self.problem, "answer": self.answer, "category": self.category}
        return {**self.extra, **plain}


@dataclass(frozen=True)
class Score:
    """Score of a response.

    reward: the value that training maximises. correct: True if the answer is right (for accuracy).
    parts: components of the reward by name, before weights. failure: kind of failure if the reward
    could not be computed; `reward` is then set by reward.on_failure. skipped: True if the response
    is not trained on.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    skipped: bool = False


def check_answer(row: Mapping[str, Any], **_: Any) -> None:
    """Check that the row has an answer. Raises ValueError without one, because no response could
    be right.
    """
    if not str(row.get("answer", "")).strip():
        raise ValueError(
            "the row has no answer that a response is compared with: name its column in "
            "data.answer_key, or take another reward"
        )


class RewardStop(RuntimeError):
    """Failure of a reward with reward.on_failure=stop."""

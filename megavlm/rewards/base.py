"""Interface of reward functions: arguments, return value and failures.

A reward is a function of a response and the row's columns (problem, answer, category and the
columns in data.extra_keys):

    score(response: str, row: Mapping[str, Any], **options)

It returns a number, or a mapping or Score with `reward` and optionally `correct` and `parts`. If it
returns only a number, a response is correct from 1 upwards. A function with the parameters
`responses` and `rows` scores a whole group at once, and returns a list with one such value for each
response:

    score(responses: list[str], rows: list[Mapping[str, Any]], **options)

A function may ask for more by the names of its parameters (CONTEXT). In a reward of a group, each
of them is a list with one item for each response.

    images: list[bytes]     the row's images, as encoded files
    finish_reason: str      "stop", or "length" for a response that was cut short
    turns: list[str]        the responses of all turns of the episode so far, this one included
    token_ids: list[int]    the sampled tokens of this response

The function may be async.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


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


CONTEXT = ("images", "finish_reason", "turns", "token_ids")


@dataclass(frozen=True)
class ResponseDetails:
    """Facts about a response that a reward may ask for, see CONTEXT."""

    finish_reason: str = "stop"
    turns: tuple[str, ...] = ()
    token_ids: Sequence[int] | npt.NDArray[np.int32] = ()


class RewardStop(RuntimeError):
    """Failure of a reward with reward.on_failure=stop."""

"""What a model answered: the raw material of every table, file and page about an evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megavlm.data.rows import Row


@dataclass(frozen=True)
class Attempt:
    """One response, of all its turns together, and its score. finish: "stop" or "length".
    failure: the kind, where the reward could not be computed; then it is not correct.
    """

    text: str
    reward: float
    correct: bool
    num_tokens: int
    finish: str
    parts: Mapping[str, float] = field(default_factory=dict)  # what the reward is made of
    failure: str | None = None


@dataclass(frozen=True)
class Question:
    row: Row
    attempts: tuple[Attempt, ...]

    @property
    def num_correct(self) -> int:
        return sum(attempt.correct for attempt in self.attempts)

    @property
    def accuracy(self) -> float:
        """The share of its attempts that are correct."""
        return self.num_correct / len(self.attempts)

    @property
    def reward(self) -> float:
        return sum(attempt.reward for attempt in self.attempts) / len(self.attempts)


@dataclass(frozen=True)
class Skipped:
    """Rows that were not asked. reasons: the first ones."""

    bad: int = 0
    long: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A model that was evaluated, and what it answered; `samples` attempts at each question."""

    name: str
    samples: int
    questions: Sequence[Question]
    skipped: Skipped
    seconds: float

    @property
    def failures(self) -> Counter[str]:
        """Attempts whose reward could not be computed, by kind."""
        attempts = [attempt for question in self.questions for attempt in question.attempts]
        return Counter(attempt.failure for attempt in attempts if attempt.failure)

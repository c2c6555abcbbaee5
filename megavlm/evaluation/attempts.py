"""Responses of a model to the questions of an evaluation, with their scores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megavlm.data.media.video_sources import AnyVideo
from megavlm.data.rows import Row


@dataclass(frozen=True)
class Turn:
    """Turn of an attempt. message, images, videos: observation before the turn; empty in the first
    one.
    """

    text: str
    message: str = ""
    images: Sequence[bytes] = ()
    videos: Sequence[AnyVideo] = ()


@dataclass(frozen=True)
class Attempt:
    """Response (the text of all its turns) and its score.

    finish: "stop" or "length". failure: kind of failure if the reward could not be computed; the
    response then counts as incorrect. turns: the single turns, if there are several.
    """

    text: str
    reward: float
    correct: bool
    num_tokens: int
    finish: str
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name
    failure: str | None = None
    turns: Sequence[Turn] = ()


@dataclass(frozen=True)
class Question:
    row: Row
    attempts: tuple[Attempt, ...]

    @property
    def num_correct(self) -> int:
        return sum(attempt.correct for attempt in self.attempts)

    @property
    def accuracy(self) -> float:
        """Share of the attempts at this question that are correct."""
        return self.num_correct / len(self.attempts)

    @property
    def reward(self) -> float:
        return sum(attempt.reward for attempt in self.attempts) / len(self.attempts)


@dataclass(frozen=True)
class SkippedRows:
    """Number of skipped rows, and the reasons of the first ones."""

    bad: int = 0
    long: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """Evaluated model with its responses: `samples` attempts at each question."""

    name: str
    samples: int
    questions: Sequence[Question]
    skipped: SkippedRows
    seconds: float

    @property
    def failures(self) -> Counter[str]:
        """Number of attempts whose reward could not be computed, by kind."""
        attempts = [attempt for question in self.questions for attempt in question.attempts]
        return Counter(attempt.failure for attempt in attempts if attempt.failure)

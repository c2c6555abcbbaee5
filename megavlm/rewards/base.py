"""What a reward function returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """reward: what training maximises. correct: whether the answer is right (for accuracy)."""

    reward: float
    correct: bool

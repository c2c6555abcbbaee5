"""Curriculum: stages of rewards, by step or by mean reward. Its state is part of a checkpoint."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megavlm.rewards.manager import Stage


@dataclass(frozen=True)
class Term:
    """A stage and when it ends: at step `until`, or once the mean reward reaches `reward`."""

    stage: Stage
    until: int | None = None
    reward: float | None = None


class Curriculum:
    def __init__(self, terms: Sequence[Term], window: int) -> None:
        """Begin with the first stage. window: steps over which a stage's mean reward counts."""
        self._terms = list(terms)
        self._current = 0
        self._rewards: deque[float] = deque(maxlen=window)

    @property
    def number(self) -> int:
        """Number of the present stage, from 0."""
        return self._current

    def stage(self, step: int) -> Stage | None:
        """Return the stage of the step after `step` finished ones, None without a curriculum."""
        while self._terms and (end := self._terms[self._current].until) is not None and step >= end:
            self._advance()
        return self._terms[self._current].stage if self._terms else None

    def record(self, reward: float) -> None:
        """Record the mean reward of a step."""
        if not self._terms:
            return
        self._rewards.append(reward)
        enough = self._terms[self._current].reward
        if enough is None or len(self._rewards) < (self._rewards.maxlen or 1):
            return
        if sum(self._rewards) / len(self._rewards) >= enough:
            self._advance()

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._current, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises ValueError if the recipe has fewer stages than the run had."""
        if state["stage"] and state["stage"] >= len(self._terms):
            raise ValueError(
                f"curriculum.stages: the checkpoint is in stage {state['stage'] + 1}, and there "
                f"are {len(self._terms)}: use its stages, or start with run.resume=never"
            )
        self._current = state["stage"]
        self._rewards.extend(state["rewards"])

    def _advance(self) -> None:
        self._current += 1
        self._rewards.clear()

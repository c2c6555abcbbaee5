"""Curriculum: stages of rewards, by step or by mean reward. Its state is part of a checkpoint."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from megavlm.config.curriculum import CurriculumConfig, CurriculumStage
from megavlm.numbers import at_least


class Curriculum:
    def __init__(self, settings: CurriculumConfig) -> None:
        """Begin with the first stage."""
        self._stages = settings.stages
        self._current = 0
        self._window = settings.window
        self._rewards: deque[float] = deque(maxlen=settings.window)

    @property
    def number(self) -> int:
        """Number of the current stage, from 0."""
        return self._current

    def stage(self, step: int) -> CurriculumStage | None:
        """Return the stage after `step` finished steps, or None without a curriculum."""
        while (
            self._stages and (end := self._stages[self._current].until) is not None and step >= end
        ):
            self._advance()
        return self._stages[self._current] if self._stages else None

    def record(self, reward: float) -> dict[str, float]:
        """Record the mean reward of a step, and return its stage as a metric."""
        if not self._stages:
            return {}
        metrics = {"curriculum_stage": float(self.number + 1)}
        self._rewards.append(reward)
        enough, is_full = self._stages[self._current].reward, len(self._rewards) == self._window
        mean = sum(self._rewards) / self._window
        if enough is not None and is_full and at_least(mean, enough):
            self._advance()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._current, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises ValueError if the recipe has fewer stages than the run had."""
        if state["stage"] and state["stage"] >= len(self._stages):
            raise ValueError(
                f"curriculum.stages: the checkpoint is in stage {state['stage'] + 1}, but there "
                f"are {len(self._stages)}: use its stages, or start with run.resume=never"
            )
        self._current = state["stage"]
        self._rewards.extend(state["rewards"])

    def _advance(self) -> None:
        self._current += 1
        self._rewards.clear()

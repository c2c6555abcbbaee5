"""The `curriculum` section: rewards that change during a run."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class CurriculumStage:
    """A stage of the curriculum. Every stage except the last ends at `until` or `reward`, whichever
    comes first."""

    until: int | None = None
    """Step at which the stage ends."""

    reward: float | None = None
    """Mean reward over `curriculum.window` steps at which the stage ends."""

    weights: dict[str, float] = field(default_factory=dict)
    """Weights of `reward.parts` by label, or of the components of a single reward that has
    components. Weights that are not named stay as in `reward`."""

    tolerance: float | None = None
    """Tolerance of rewards that have one. Null keeps the tolerance in `reward`."""


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(Section):
    """Stages of training, each with its own reward. Evaluations use the plain `reward` section."""

    stages: list[CurriculumStage] = field(default_factory=list)
    """Stages in order; the last one lasts to the end of the run. Empty keeps one reward."""

    window: int = bounded(10, least=1)
    """Number of steps over which the reward is averaged to decide whether a stage ends."""

    def check(self) -> None:
        for number, stage in enumerate(self.stages):
            key = f"curriculum.stages[{number}]"
            last = number == len(self.stages) - 1
            if last != (stage.until is None and stage.reward is None):
                raise ValueError(
                    f"{key} {'ends, but it is the last' if last else 'never ends'}: every stage "
                    "but the last needs until or reward, and the last has neither"
                )
            if stage.reward is not None and not math.isfinite(stage.reward):
                raise ValueError(f"{key}.reward={stage.reward} must be a finite number")
            if stage.tolerance is not None and not 0 < stage.tolerance < math.inf:
                raise ValueError(f"{key}.tolerance={stage.tolerance} must be above 0")
            if not all(0 <= weight < math.inf for weight in stage.weights.values()):
                raise ValueError(f"{key}.weights={stage.weights} must be numbers of at least 0")
        ends = [stage.until for stage in self.stages if stage.until is not None]
        if any(later <= earlier for earlier, later in pairwise(ends)) or (ends and ends[0] <= 0):
            raise ValueError(f"curriculum.stages end at {ends}: each must end after the one before")

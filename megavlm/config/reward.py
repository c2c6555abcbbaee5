"""The `reward` section: how responses are scored."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from megavlm.config.section import Section, bounded

_LABEL = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One of several weighted rewards."""

    name: str = ""
    """Reward, as in `reward.name`. Required."""

    weight: float = 1.0
    """Factor of this part in the sum; it may be negative."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""


@dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """The reward of a response or, with `parts`, a weighted sum of several."""

    name: str | None = None
    """Reward: boxed, exact_match, zero (0 for every response), a task, reward_model for a model
    behind an OpenAI-compatible endpoint, a function of your own as package.module:function, or the
    URL of a service. Null uses the reward of the environment's task, zero for an adapter to another
    library, and else exact_match."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""

    parts: dict[str, RewardPart] = field(default_factory=dict)
    """Several rewards by label, used instead of `reward.name`. The first part decides whether a
    response is correct."""

    on_failure: Literal["zero", "skip", "stop"] = "zero"
    """Handling of a response whose reward fails: it gets `reward.failure_value` (zero), is not
    trained on (skip), or ends the run (stop)."""

    failure_value: float = bounded(0.0)
    """Reward of a response whose reward function fails. If incorrect responses get a negative
    reward, a failure should get the same."""

    timeout: float = bounded(10.0, above=0)
    """Seconds that one call of a reward may take: for one response, or for one group if the reward
    scores groups."""

    memory_mb: int = bounded(2048, least=256)
    """Memory limit of each reward process in MB."""

    workers: int = bounded(2, least=1)
    """Number of processes that compute rewards."""

    def check(self) -> None:
        if self.parts and (self.name is not None or self.options):
            key = "name" if self.name is not None else "options"
            raise ValueError(
                f"reward.{key}={getattr(self, key)} would not be used with reward.parts: "
                "make it one of the parts, or remove the parts"
            )
        for label, part in self.parts.items():
            if not _LABEL.fullmatch(label):
                raise ValueError(
                    f"reward.parts has the label {label!r}: use letters, digits, _ and -"
                )
            if not part.name:
                raise ValueError(
                    f"reward.parts.{label} has no name: set reward.parts.{label}.name to a reward"
                )
            if not math.isfinite(part.weight):
                raise ValueError(
                    f"reward.parts.{label}.weight={part.weight} must be a finite number"
                )

"""Keys of the sections `environment`, `reward` and `curriculum`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megavlm.config.bounds import bounded


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`name`: a built-in one, or package.module:Class with `options` of its own. An episode has at
    most `max_turns` responses, and between two of them an observation of at most
    `max_observation_tokens`. `timeout`: seconds for one reset or step, rewards apart. Classes of
    your own run in `workers` processes, each with `memory_mb`."""

    name: str = "single_turn"
    options: dict[str, Any] = field(default_factory=dict)
    max_turns: int = bounded(1, least=1)
    max_observation_tokens: int = bounded(256, least=1)
    timeout: float = bounded(60.0, above=0)
    workers: int = bounded(2, least=1)
    memory_mb: int = bounded(2048, least=256)


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One of several rewards, as in Reward."""

    name: str = ""
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`name`: a built-in reward, package.module:function or a URL, with `options`; null takes the
    environment's own. `parts`: several of them by label, weighted; what is correct is what the
    first says. Rewards run in `workers` processes, each response for at most `timeout` seconds and
    in `memory_mb`. `on_failure`: a response whose reward fails gets `failure_value` (zero), is not
    trained on (skip), or ends the run (stop). Where a wrong answer costs something, let a failure
    cost as much."""

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, RewardPart] = field(default_factory=dict)
    on_failure: Literal["zero", "skip", "stop"] = "zero"
    failure_value: float = bounded(0.0)
    timeout: float = bounded(10.0, above=0)
    memory_mb: int = bounded(2048, least=256)
    workers: int = bounded(2, least=1)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Lasts up to step `until`, or until the mean reward over `curriculum.window` steps reaches
    `reward`, whichever comes first. `weights`: of reward.parts, or of the only reward's components;
    `tolerance`: of rewards that have one."""

    until: int | None = None
    reward: float | None = None
    weights: dict[str, float] = field(default_factory=dict)
    tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """What rewards ask for, stage by stage; the last one lasts. Evaluation keeps to `reward`."""

    stages: list[Stage] = field(default_factory=list)
    window: int = bounded(10, least=1)

"""The `environment` section: the environment that episodes run in."""

from dataclasses import dataclass, field
from typing import Any

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section):
    """The environment of every episode, either built in or a class of the user's own."""

    name: str = "single_turn"
    """Environment: single_turn, a built-in task or one of its variants, a class of your own as
    package.module:Class, or a task of your own by its package."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    max_turns: int = bounded(1, least=1)
    """Maximum number of responses in an episode."""

    max_observation_tokens: int = bounded(256, least=1)
    """Maximum length in tokens of an observation between two responses, image tokens included."""

    timeout: float = bounded(60.0, above=0)
    """Seconds that one reset, step or close of the environment may take, rewards not included."""

    workers: int = bounded(2, least=1)
    """Number of processes that run a class of your own. Each of them runs many episodes at the same
    time. Built-in environments run in the driver."""

    memory_mb: int = bounded(2048, least=256)
    """Memory limit of each of these processes in MB, which its episodes share."""

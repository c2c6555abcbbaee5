"""The `environment` section: how an episode goes."""

from dataclasses import dataclass, field
from typing import Any

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section):
    """The environment of every episode, built in or a user's own."""

    name: str = "single_turn"
    """Built-in environment (single_turn, geo3k, geo3k_calculator, vqa, vqa_retry, caption, geospot)
    or a class of your own as package.module:Class."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    max_turns: int = bounded(1, least=1)
    """Most responses of an episode."""

    max_observation_tokens: int = bounded(256, least=1)
    """Longest observation between two responses in tokens, image tokens included."""

    timeout: float = bounded(60.0, above=0)
    """Seconds for one reset or step of the environment, rewards apart."""

    workers: int = bounded(2, least=1)
    """Processes in which a class of your own runs. Built-in environments run in the driver."""

    memory_mb: int = bounded(2048, least=256)
    """Memory of each of these processes in MB."""

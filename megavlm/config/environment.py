"""The `environment` section: the environment that episodes run in."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megavlm.config.section import Section, bounded, follows


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section):
    """The environment of every episode, either built in or a class of the user's own."""

    name: str = "single_turn"
    """Environment: single_turn, tools, gateway, an adapter to another library (gymnasium, openenv,
    verifiers), a built-in task or one of its variants, a class of your own as package.module:Class,
    or a task of your own by its package."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    tools: tuple[str, ...] = ()
    """Tools that the policy may call, for environment.name=tools or a ToolEnvironment of your own:
    functions as package.module:name, and MCP servers as a URL (streamable HTTP) or a command line
    (stdio)."""

    max_turns: int = bounded(1, least=1)
    """Maximum number of responses in an episode."""

    max_observation_tokens: int = bounded(256, least=1)
    """Maximum length in tokens of an observation between two responses, image tokens included."""

    max_images: int | None = bounded(None, least=1)
    """Maximum number of images in a prompt, the row's included; null sets no limit."""

    max_tokens: int | None = bounded(None, least=1)
    """Maximum length in tokens of an episode: its prompt, responses and observations. After an
    observation, a response of rollout.max_new_tokens must fit. null sets no limit. With the
    gateway, which needs it: tokens of all calls, where tokens that calls share count once."""

    over_budget: Literal["refuse", "replace", "end"] = "refuse"
    """What happens to an observation that exceeds max_observation_tokens, max_images or max_tokens:
    refuse (the policy reads why instead), replace (the oldest image that is not the row's becomes a
    note, and anything else is refused), or end (the episode ends)."""

    timeout: float = bounded(60.0, above=0)
    """Seconds that one reset, step or close of the environment may take, rewards not included; or
    an agent of the gateway, without the time in which it waits for responses."""

    tool_timeout: float = follows(30.0, above=0)
    """Seconds that the tools of a turn may take; then the policy reads an error. By default half of
    environment.timeout."""

    workers: int = bounded(2, least=1)
    """Number of processes that run a class, tools or an agent of your own. Each of them runs many
    episodes at the same time. Built-in environments run in the driver."""

    memory_mb: int = bounded(2048, least=256)
    """Memory limit of each of these processes in MB, which its episodes share."""

    def check(self) -> None:
        if self.name == "tools" and not self.tools:
            raise ValueError(
                "environment.name=tools has no environment.tools: name your functions there, as "
                "[package.module:name], or MCP servers"
            )
        if self.name == "gateway" and self.max_tokens is None:
            raise ValueError(
                "environment.name=gateway has no environment.max_tokens: set how many tokens all "
                "calls of an episode may have, where tokens that calls share count once"
            )
        if self.tool_timeout >= self.timeout:
            raise ValueError(
                f"environment.tool_timeout={self.tool_timeout:g} must be below environment.timeout="
                f"{self.timeout:g} (the end of the episode): lower it, or raise the other"
            )

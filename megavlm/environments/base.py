"""Interface of environments.

environment.name=package.module:Class names the class of an environment. An instance is made for
each episode, `Class(context, **environment.options)`, and has two methods:

    async def reset(self, row: Example, seed: int) -> Observation
    async def step(self, text: str) -> Step

All episodes of a group start from one prompt: `reset` depends on row and seed only. Each reset and
step runs in one of environment.workers processes, for at most environment.timeout seconds (without
the time of rewards) and in environment.memory_mb. Between its turns an environment is pickled and
may continue in another process: files, connections and the like belong in its module. A step that
fails or is killed ends its episode, scored by reward.on_failure.

An episode that the environment has not ended is over after environment.max_turns responses, or with
a truncated response: the configured reward of that response is then added to the step's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megavlm.rewards.base import Example, Score

# role and content, in which <image> stands for an image; further keys are the chat template's
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """Messages before a response. images: encoded files, one for each <image>, or shown first if no
    message has one.
    """

    messages: Sequence[ChatMessage]
    images: Sequence[bytes] = ()


@dataclass(frozen=True)
class Step:
    """Result of a turn. observation: the next one, None if `done`. reward: of this turn; an
    episode's is the sum. info: `score`, the Score behind the reward, or `correct` and `parts` as in
    one.
    """

    observation: Observation | None
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Context of an episode. score: computes the configured reward of a response, in a process with
    limits. max_turns: of an episode.
    """

    score: Callable[[str, Example], Awaitable[Score]]
    max_turns: int


class Environment(Protocol):
    async def reset(self, row: Example, seed: int) -> Observation: ...

    async def step(self, text: str) -> Step: ...


def scored(score: Score) -> Step:
    """Return the last step of an episode, with the reward of a score."""
    return Step(None, score.reward, True, {"score": score})

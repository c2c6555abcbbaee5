"""Interface of environments.

environment.name=package.module:Class names the class of an environment. An instance is made for
each episode, `Class(context, **environment.options)`, and has two methods:

    async def reset(self, row: Example, seed: int) -> Observation
    async def step(self, text: str) -> Step

All episodes of a group start from the same prompt, so `reset` must depend only on row and seed.
Each reset and step runs in one of environment.workers processes, for at most environment.timeout
seconds (not counting rewards) and within environment.memory_mb. An environment is pickled between
its turns and may continue in another process, so keep files, connections and the like in its
module. If a step fails or is killed, its episode ends and is scored by reward.on_failure.

If the environment does not end an episode, it ends after environment.max_turns responses or with a
truncated response. The configured reward of that response is then added to the reward of the step.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megavlm.rewards.base import Example, Score

# role, content (with <image> for each image), and other keys for the chat template
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """Messages before a response. images: encoded files, one for each <image>; without any <image>
    in the messages, the images come first.
    """

    messages: Sequence[ChatMessage]
    images: Sequence[bytes] = ()


@dataclass(frozen=True)
class Step:
    """Result of a turn.

    observation: the next observation, None if `done`. reward: the reward of this turn; the rewards
    of an episode are summed. info: either `score`, the Score behind the reward, or `correct` and
    `parts` with the same meaning as in a Score.
    """

    observation: Observation | None
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Context of an episode. score: computes the configured reward of a response, in a process with
    limits. max_turns: largest number of turns of an episode.
    """

    score: Callable[[str, Example], Awaitable[Score]]
    max_turns: int


class Environment(Protocol):
    async def reset(self, row: Example, seed: int) -> Observation: ...

    async def step(self, text: str) -> Step: ...


def scored(score: Score) -> Step:
    """Return the last step of an episode, with the reward of the score."""
    return Step(None, score.reward, True, {"score": score})

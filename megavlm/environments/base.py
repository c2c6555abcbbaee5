"""Interface of environments.

environment.name=package.module:Class names the class of an environment. An instance is made for
each episode, `Class(context, **environment.options)`, and has two methods, or three:

    async def reset(self, row: Example, seed: int) -> Observation
    async def step(self, text: str) -> Step
    async def close(self) -> None

All episodes of a group start from the same prompt, so `reset` must depend only on row and seed.

An instance lives in one thread of one process, with one asyncio loop, from its reset to its close.
It may hold anything: a browser, a generator, a socket, a task that goes on between turns.
Each of environment.workers processes has many instances, whose calls run at the same time, also
where one blocks. What belongs to the module is shared by the instances of a process.

`close` is optional, and may be a plain method. It is called once: when the episode has ended, when
a call has failed or taken too long, when the episode is not played on, and at the end of the run.
No step waits for it. A call that runs too long is cancelled first. If it blocks its thread, `close`
is called when it returns, and not at all if it does not.

Each reset, step and close may take environment.timeout seconds, not counting rewards, and the
instances of a process share environment.memory_mb. If a step fails, its episode ends and is scored
by reward.on_failure. If the process runs out of memory or dies, all episodes in it fail. A call
that takes too long fails alone; if it does not end when it is cancelled, its process takes no
further episodes, and is killed when the others in it have ended.

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

    # Optional: def close(self) -> None, or async


def scored(score: Score) -> Step:
    """Return the last step of an episode, with the reward of the score."""
    return Step(None, score.reward, True, {"score": score})

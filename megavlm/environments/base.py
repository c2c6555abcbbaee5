"""The one interface of environments, and what they are made with.

A class of an environment is given as environment.name=package.module:Class. It is made anew for
each episode, `Class(context, **environment.options)`, and asked:

    async def reset(self, row: Example, seed: int) -> Observation
    async def step(self, text: str) -> Step

All episodes of a group start from one prompt: `reset` depends on nothing but row and seed. Each
reset and step runs in one of environment.workers processes, for at most environment.timeout seconds
(rewards apart) and in environment.memory_mb. Between its turns an environment is pickled, and goes
on in any of them: what cannot be pickled (files, connections) belongs into its module. A step that
fails or is killed ends its episode, by reward.on_failure.

An episode that the environment has not ended is over after environment.max_turns responses, or with
one that was cut short: then the configured reward of that response is added to the step's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megavlm.rewards.base import Example, Score

Message = Mapping[str, str]  # role and content; <image> in the content stands for an image


@dataclass(frozen=True)
class Observation:
    """What comes before a response. `images`: encoded files, one for each <image>, or shown first
    where no message has one.
    """

    messages: Sequence[Message]
    images: Sequence[bytes] = ()


@dataclass(frozen=True)
class Step:
    """`observation`: what follows; None where `done`. reward: of this turn; an episode's is the
    sum. info: `score`, a Score that the reward is of, or `correct` and `parts` as in one.
    """

    observation: Observation | None
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """score: the configured reward of a response, in a process with limits. max_turns: of an
    episode, which ends after so many.
    """

    score: Callable[[str, Example], Awaitable[Score]]
    max_turns: int


class Environment(Protocol):
    async def reset(self, row: Example, seed: int) -> Observation: ...

    async def step(self, text: str) -> Step: ...


def scored(score: Score) -> Step:
    """The last step of an episode whose reward is `score`."""
    return Step(None, score.reward, True, {"score": score})

"""The environment of one episode, with a time limit for its calls and checks of its steps'
values.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments.base import ChatFormat, Context, Observation, Step
from megavlm.environments.processes import EnvironmentPool, Local
from megavlm.numbers import at_least, is_float32
from megavlm.rewards.base import Example, ResponseDetails, RewardStop, Score
from megavlm.subprocess_pool.failure import CallFailure

T = TypeVar("T")
TICK = 0.1  # seconds


class TimedEnvironment:
    """An environment whose calls may each take `environment.timeout` seconds, not counting rewards.

    A call that fails raises CallFailure, with `name` in the message.
    """

    def __init__(
        self,
        environments: Local | EnvironmentPool,
        settings: EnvironmentConfig,
        chat: ChatFormat,
        reward: Callable[..., Awaitable[Score]],
        name: str,
    ) -> None:
        """chat: Form of the policy's responses. reward: RewardManager.score, with the curriculum's
        stage bound.
        """
        self._environments: Any = environments
        self._environment: Any = None  # from its reset to its close
        self._settings, self._reward, self._name = settings, reward, name
        self._context = Context(
            self.score,
            settings.max_turns,
            chat,
            tool_timeout=settings.tool_timeout,
            max_observation_tokens=settings.max_observation_tokens,
        )
        self._pending = 0  # rewards and responses that the environment waits for
        self._details = ResponseDetails()

    async def reset(self, row: Example, seed: int) -> Observation:
        """Make the environment, and reset it."""
        self._row = row
        self._environment = await self._call(self._environments.make(self._context), None)
        return await self._call(self._environment.reset(row, seed), self._settings.timeout)

    async def step(
        self, text: str, details: ResponseDetails, sizes: Mapping[str, tuple[int, int]]
    ) -> Step:
        """Play a turn.

        details: Facts about the response for rewards that the environment asks for during this
            turn.
        sizes: Width and height of each image of the prompt as the model sees it, by the SHA-256
            of its file.
        """
        self._details = details
        self._context.shown_sizes.clear()
        self._context.shown_sizes.update(sizes)
        return await self._call(self._environment.step(text), self._settings.timeout)

    def close(self) -> None:
        """Begin to close the environment, if it is open. Needs the running asyncio loop."""
        if self._environment is not None:
            self._environments.end(self._environment)
        self._environment = None

    async def score(self, text: str, row: Example | None = None) -> Score:
        """Return the configured reward of a response to `row`; None takes the episode's row. The
        time limit of the running call is paused until all of its concurrent rewards are computed.
        """
        with self.paused():
            return await self._reward(text, row or self._row, details=self._details)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time towards the running call's limit."""
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1

    def note(self, details: ResponseDetails) -> None:
        """Take facts about the latest response, for rewards that the environment asks for."""
        self._details = details

    async def _call(self, call: Awaitable[T], seconds: float | None) -> T:
        try:
            return await self._within(call, seconds)
        except RewardStop:
            raise
        except CallFailure as failure:
            raise CallFailure(failure.kind, f"{self._name}: {failure}") from failure
        except TimeoutError as error:
            message = f"{self._name}: no answer in {self._settings.timeout:g} s"
            raise CallFailure("timeout", message) from error
        # An environment may raise any exception, and only its own episode should fail.
        except Exception as error:
            raise CallFailure("exception", f"{self._name}: {error!r}"[:500]) from error

    async def _within(self, call: Awaitable[T], seconds: float | None) -> T:
        """Return the result of a call. Raises TimeoutError if it takes too long.

        Time is counted in ticks, because a deadline would also count the time in which the loop
        stands still for a weight push, although the answer may be waiting.
        """
        task = asyncio.ensure_future(call)
        left = math.inf if seconds is None else seconds
        tick = min(left, TICK)
        try:
            while not (await asyncio.wait([task], timeout=tick))[0]:
                left -= 0.0 if self._pending else tick
                if left <= 0:
                    raise TimeoutError
            return task.result()
        finally:
            task.cancel()


def step_score(step: Step, name: str, before: float) -> tuple[float, Score]:
    """Return a step's reward, and the score in its info. Without a score there, the episode counts
    as correct if its total reward is at least 1.

    before: Sum of the episode's earlier rewards. name: Name of the environment, for messages.
    Raises CallFailure if the values are not finite numbers.
    """
    try:
        reward, info = float(step.reward), step.info
        score = info.get("score")
        if score is None:
            parts = {str(k): float(v) for k, v in info.get("parts", {}).items()}
            score = Score(reward, bool(info.get("correct", at_least(before + reward, 1))), parts)
        counts = map(float, info.get("counts", {}).values())
        numbers = [reward, score.reward, *score.parts.values(), *counts]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CallFailure("value", f"{name}: {error!r}"[:500]) from error
    if not all(map(is_float32, numbers)):
        raise CallFailure("value", f"{name}: a step's reward, parts or counts are {numbers}")
    return reward, score

"""An episode while it is played, and what an environment's step is worth."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from megavlm.data.processor import Prompt
from megavlm.environments.base import Environment, Step
from megavlm.rewards.base import Example, RewardFailure, Score
from megavlm.rollout.trajectory import Episode, Turn

T = TypeVar("T")


class ActiveEpisode:
    """`prompt`: of the next turn. `last`: the score of the turn before."""

    environment: Environment
    last: Score

    def __init__(
        self,
        prompt: Prompt,
        row: Example,
        reward_manager: Callable[[str, Example], Awaitable[Score]],
    ) -> None:
        self.prompt, self.row, self._reward_manager = prompt, row, reward_manager
        self.turns: list[Turn] = []
        self.ended = False
        self._clock: asyncio.Timeout | None = None
        self._left, self._asked = 0.0, 0

    async def bounded(self, waiting: Awaitable[T], timeout: float | None) -> T:
        """TimeoutError after so many seconds, those of `score` apart."""
        async with asyncio.timeout(timeout) as self._clock:
            try:
                return await waiting
            finally:
                self._clock = None

    async def score(self, text: str, row: Example) -> Score:
        """Waiting for a reward is no time of the environment's, of several at once neither."""
        loop, clock = asyncio.get_running_loop(), self._clock
        until = None if clock is None else clock.when()
        if clock is not None and until is not None:
            self._left = until - loop.time()
            clock.reschedule(None)
        self._asked += 1
        try:
            return await self._reward_manager(text, row)
        finally:
            self._asked -= 1
            if clock is not None and self._left and not self._asked:
                clock.reschedule(loop.time() + self._left)
                self._left = 0.0

    def episode(self) -> Episode:
        total = sum(turn.reward for turn in self.turns)
        return Episode(tuple(self.turns), replace(self.last, reward=total))


def checked(step: Step, name: str, before: float) -> tuple[float, Score]:
    """A step's reward, and the score that its info tells; correct without a word from 1, of all
    turns together. `before`: the rewards of those before; name: of the environment, for errors.

    Raises RewardFailure where these are no numbers.
    """
    try:
        worth, info = float(step.reward), step.info
        score = info.get("score")
        if score is None:
            parts = {str(k): float(v) for k, v in info.get("parts", {}).items()}
            score = Score(worth, bool(info.get("correct", before + worth >= 1)), parts)
        numbers = [worth, *score.parts.values()]
    except (AttributeError, TypeError, ValueError) as error:
        raise RewardFailure("value", f"{name}: {error!r}"[:500]) from error
    if not all(map(math.isfinite, numbers)):
        raise RewardFailure("value", f"{name}: a step's reward or parts are {numbers}")
    return worth, score

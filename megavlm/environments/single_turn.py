"""Episodes of one turn: the row's prompt, one response, and its reward."""

from megavlm.environments.base import Context, Observation, Step, scored
from megavlm.rewards.base import Example


class SingleTurn:
    runs_in_driver = True

    def __init__(self, context: Context) -> None:
        self._score = context.score

    async def reset(self, row: Example, seed: int) -> Observation:
        self._row = row
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        return scored(await self._score(text, self._row))

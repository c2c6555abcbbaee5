"""An environment whose steps wait for a tool."""

import asyncio

from megavlm.environments.base import Context, Observation, Step
from megavlm.rewards.base import Example

SECONDS = 0.2


class Slow:
    def __init__(self, context: Context) -> None:
        self.turns = context.max_turns

    async def reset(self, row: Example, seed: int) -> Observation:
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        await asyncio.sleep(SECONDS)
        self.turns -= 1
        again = Observation([{"role": "user", "content": "No. Look again."}])
        return Step(again if self.turns else None, 1.0, not self.turns)

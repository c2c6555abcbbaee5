"""The environment of `make demo ENV=browser`: a page with a picture, a field and a button."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

from megavlm.environments.base import Context, Observation, Step
from megavlm.environments.browser.environment import Browser
from megavlm.rewards.base import Example

SIDE = 84  # pixels of the page


class Board(Browser):
    """An episode on board.html. The row's image is a part of the page, so that evaluations with
    shuffled images shuffle what the screenshots show. The reward is 1 for the row's answer.
    """

    def __init__(self, context: Context, **options: Any) -> None:
        """Store the options, which are Browser's."""
        super().__init__(context, str(Path(__file__).parent), (SIDE, SIDE), **options)

    async def reset(self, row: Example, seed: int) -> Observation:
        """Open the page. The policy sees the row's image in the screenshot only."""
        self._picture = base64.b64encode(row.images[0]).decode()
        asked = [
            {**said, "content": said["content"].replace("<image>", "")} for said in row.messages
        ]
        return await super().reset(replace(row, images=(), chat=tuple(asked)), seed)

    async def open(self, row: Example, seed: int) -> str:
        """Open the page with the row's picture."""
        await self.open_page("board.html")
        await self.evaluate("show", [f"data:image/png;base64,{self._picture}", row.category])
        return ""

    async def outcome(self, answer: str | None) -> Step | None:
        """Return the last step once the page has a choice. An answer in words is wrong."""
        said = await self.evaluate("said")
        if said is None and answer is None:
            return None
        right = said == self.row.answer
        return Step(None, float(right), True, {"correct": right})

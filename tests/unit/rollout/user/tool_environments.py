"""Environments with tools, as a user writes them."""

from io import BytesIO
from typing import Any

from PIL import Image as Picture

from megavlm.environments.base import Context, Image, Observation, Step
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import tool
from megavlm.rewards.base import Example


class Looking(ToolEnvironment):
    """Shows a box of the row's image."""

    @tool
    def look(self, box: tuple[int, int, int, int]) -> list[Any]:
        """Look at a box."""
        with Picture.open(BytesIO(self.row.images[0])) as picture:
            return ["the box:", Image.of(picture.convert("RGB").crop(box))]

    @tool
    def read(self, text: str) -> str:
        """Repeat a text."""
        return text


class Showing:
    """Shows `show` images a turn, and words, more of them after each image."""

    def __init__(self, context: Context, show: int = 1, words: int = 0) -> None:
        self.show, self.words, self.shown = show, words, 0

    async def reset(self, row: Example, seed: int) -> Observation:
        return Observation(row.messages, row.images)

    async def step(self, text: str) -> Step:
        parts: list[Any] = [f"turn {self.shown}" + " more" * self.words * (self.shown + 1)]
        for _ in range(self.show):
            self.shown += 1
            parts.append(Image.of(Picture.new("RGB", (56, 28), (20 * self.shown, 0, 0))))
        return Step(Observation([{"role": "user", "content": parts}]), 0.25, False)

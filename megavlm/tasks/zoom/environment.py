"""Thinking with images: the policy looks closer before it answers."""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Len
from PIL.Image import Image as Picture
from pydantic import FiniteFloat

from megavlm.data.media.image_decoding import decode
from megavlm.environments.base import Context, Image, Observation, RecordedAction, Step
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import ToolError, tool
from megavlm.rewards.base import Example
from megavlm.tasks.zoom import pictures

Coordinates = Literal["relative", "pixels"]
_DESCRIPTIONS = {
    "relative": "from 0 to 1000 across and down the image",
    "pixels": "in pixels of the image as you see it",
}
TEXT_TOKENS = 32  # of a result, besides its image
# Decoded pictures take up to 192 MiB, and all sessions of a process share its memory.
_DECODED = threading.BoundedSemaphore(4)

Box = Annotated[list[FiniteFloat], Len(4, 4)]
Place = Annotated[list[FiniteFloat], Len(2, 4)]


class Zoom(ToolEnvironment):
    """Tools that show an image of the episode in another way. Images are numbered as they are
    shown, results included. A result is shrunk to the tokens that an observation may have.
    """

    def __init__(
        self,
        context: Context,
        coordinates: Coordinates | None = None,
        min_tokens: int = 256,
        show_tools: bool = True,
    ) -> None:
        """Store the options.

        coordinates: relative (0 to 1000) or pixels (of the image as the model sees it); None takes
            the form on which the model's family was trained.
        min_tokens: Tokens to which a smaller crop is enlarged.
        show_tools: False if the prompt already explains the tools.
        """
        super().__init__(context, show_tools)
        self._coordinates: Coordinates = coordinates or context.chat.coordinates
        self._min_tokens = min_tokens

    async def check(self) -> None:
        """Raise ValueError for an option that cannot be used."""
        if self._coordinates not in _DESCRIPTIONS:
            raise ValueError(
                f"environment.options.coordinates={self._coordinates!r} must be relative or pixels"
            )
        if type(self._min_tokens) is not int or self._min_tokens < 1:
            raise ValueError(
                f"environment.options.min_tokens={self._min_tokens!r} must be a number of at "
                "least 1"
            )

    async def reset(self, row: Example, seed: int) -> Observation:
        self._files = list(row.images)
        self._sizes: dict[str, tuple[int, int]] = {}  # of all images that were shown
        shown = await super().reset(row, seed)
        return replace(shown, tools=[self._described(tool) for tool in shown.tools])

    async def step(self, text: str) -> Step:
        self._sizes |= self.context.shown_sizes
        return await super().step(text)

    @tool
    def zoom(self, box: Box, image: int = 1) -> Sequence[str | Image]:
        """Show a part of an image enlarged. box is [left, top, right, bottom], {coordinates}; image
        is the number of the image, from 1 on, and earlier results count.
        """
        inside = self._box(box, image)
        self._record("zoom", image, inside)
        return self.show(image, lambda shown: pictures.crop(shown, inside), self._min_tokens)

    @tool
    def rotate(self, degrees: int, image: int = 1) -> Sequence[str | Image]:
        """Show an image turned clockwise."""
        self._record("rotate", image, amount=degrees)
        return self.show(image, lambda shown: pictures.rotated(shown, degrees))

    @tool
    def mark(self, place: Place, image: int = 1) -> Sequence[str | Image]:
        """Show an image with a place marked in red: a box [left, top, right, bottom] or a point
        [x, y], {coordinates}.
        """
        if len(place) == 3:
            raise ToolError("mark: place has 3 numbers: give 4 for a box or 2 for a point")
        there = self._box(place, image) if len(place) == 4 else self._point(place, image)
        self._record("mark", image, there)
        # Drawn last, so that the line is as wide as the result is seen.
        return self.show(image, lambda shown: shown, draw=lambda s: pictures.marked(s, there))

    def show(
        self,
        image: int,
        change: Callable[[Picture], Picture],
        min_tokens: int = 1,
        draw: Callable[[Picture], Picture] = lambda shown: shown,
    ) -> Sequence[str | Image]:
        """Return an image after a change as the result of a tool.

        image: Its number, from 1 on. min_tokens: Tokens to which the result is enlarged. draw:
        Draws on the result in its final size. Raises ToolError for a number of no image, and for a
        result that is too narrow.
        """
        self._size(image)
        room = self.context.max_observation_tokens // len(self.reply.calls) - TEXT_TOKENS
        with _DECODED:
            picture = change(decode(self._files[image - 1]))
            try:
                fitting = pictures.fitted(
                    picture, self.context.chat.token_side, min_tokens, max(room, 1)
                )
            except ValueError as error:
                raise ToolError(str(error)) from error
            result = Image.of(draw(fitting))
        self._files.append(result.data)
        return [f"Image {len(self._files)}:", result]

    def _record(
        self, kind: str, image: int, at: Sequence[float] = (), amount: float | None = None
    ) -> None:
        """Note an action for the report. Raises ToolError for a number of no image."""
        self._size(image)
        digest = hashlib.sha256(self._files[image - 1]).hexdigest()
        self.actions.append(RecordedAction(kind, digest, at, amount=amount))

    def _described(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool with the form of coordinates in its description."""
        function = shown["function"]
        text = function["description"].replace("{coordinates}", _DESCRIPTIONS[self._coordinates])
        return {**shown, "function": {**function, "description": text}}

    def _box(self, box: Sequence[float], image: int) -> list[float]:
        span = self._span(image)
        try:
            return pictures.within(pictures.shares(box, span))
        except ValueError as error:
            raise ToolError(
                f"the box {_shown(box)} {error}; image {image} spans [0, 0, {span[0]}, {span[1]}]"
            ) from error

    def _point(self, point: Sequence[float], image: int) -> list[float]:
        span = self._span(image)
        found = pictures.shares(point, span)
        if not all(0 <= share <= 1 for share in found):
            raise ToolError(
                f"the point {_shown(point)} is outside of image {image} with the span "
                f"[0, 0, {span[0]}, {span[1]}]"
            )
        return found

    def _span(self, image: int) -> tuple[int, int]:
        """Return the coordinates of an image's right and bottom edge."""
        size = self._size(image)
        return (1000, 1000) if self._coordinates == "relative" else size

    def _size(self, image: int) -> tuple[int, int]:
        """Return the size at which the model sees an image. Raises ToolError if it never did."""
        digests = [hashlib.sha256(file).hexdigest() for file in self._files]
        known = [n for n, digest in enumerate(digests, 1) if digest in self._sizes]
        if image not in known:
            there = ", ".join(map(str, known)) or "none"
            raise ToolError(f"there is no image {image}; the images that you have seen: {there}")
        return self._sizes[digests[image - 1]]


def _shown(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"

"""Episodes on a screen: the policy sees screenshots and acts by mouse and keyboard.

`Computer` knows no browser. A class for one extends it, such as megavlm/environments/browser, or
one for a desktop behind an HTTP server.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Annotated, Any, Literal

from annotated_types import Len
from PIL import Image as Picture
from PIL import ImageDraw, ImageFont
from pydantic import FiniteFloat

from megavlm.environments.adapters.messages import opening
from megavlm.environments.base import (
    Content,
    Context,
    Image,
    Observation,
    RecordedAction,
    Step,
    scored,
)
from megavlm.environments.tools.calls import MalformedCall, ToolCall, read_reply
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import ToolError, tool
from megavlm.rewards.base import Example

Kind = Literal["click", "double_click", "drag", "type", "key", "scroll", "wait"]
Point = Annotated[list[FiniteFloat], Len(2, 2)]
MAX_TEXT = 4000  # characters beside a screenshot
MAX_WAIT = 10.0  # seconds
_PLACED = ("click", "double_click", "drag", "scroll")
_COORDINATES = {
    "relative": "from 0 to 1000 across and down the screen",
    "pixels": "in pixels of the screenshot as you see it",
}


@dataclass(frozen=True)
class View:
    """What a screen shows.

    picture: Encoded file of the screenshot. text: Text that the policy reads with it, such as a
    tree of accessible elements. marks: Boxes (left, top, right, bottom) of the elements that can
    be clicked, in pixels of the picture.
    """

    picture: bytes
    text: str = ""
    marks: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Action:
    """An action on a screen.

    at: Place in pixels of the view's picture, across and down; of a drag, its beginning. to: End of
    a drag. text: Text to type, or keys joined by +. amount: Notches of the wheel, downwards if
    positive; of wait, seconds.
    """

    kind: Kind
    at: tuple[float, float] = (0.0, 0.0)
    to: tuple[float, float] = (0.0, 0.0)
    text: str = ""
    amount: float = 0.0


class Computer(ToolEnvironment):
    """An episode on a screen. A class that extends it has four methods: open, look, act and close.
    It may also have `outcome`, if the screen itself tells when a task is done.

    The policy sees the row's prompt, what `open` returns and a screenshot, and acts by the tool
    `computer`, whose result is the next screenshot. A response without a call is the answer.
    """

    def __init__(
        self,
        context: Context,
        coordinates: Literal["relative", "pixels"] | None = None,
        marks: bool = False,
        seconds: float = 600.0,
        show_tools: bool = True,
    ) -> None:
        """Store the options.

        coordinates: relative (0 to 1000) or pixels (of the screenshot as the model sees it); None
            takes the form on which the model's family was trained.
        marks: True numbers the elements of the screen in the screenshot; the policy may name these
            numbers in place of coordinates.
        seconds: Seconds that the screen may take in an episode. After them, or after
            environment.max_turns responses, the episode ends with the reward 0.
        show_tools: False if the prompt already explains the tool.
        """
        super().__init__(context, show_tools)
        self._coordinates = coordinates or context.chat.coordinates
        self._has_marks, self._seconds = marks, seconds
        self._answer: str | None = None
        self._end: Step | None = None

    async def check(self) -> None:
        """Raise ValueError for an option that cannot be used."""
        if self._coordinates not in _COORDINATES:
            raise ValueError(
                f"environment.options.coordinates={self._coordinates!r} must be relative or pixels"
            )
        if not isinstance(self._seconds, int | float) or not self._seconds > 0:
            raise ValueError(
                f"environment.options.seconds={self._seconds!r} must be a number above 0"
            )

    async def open(self, row: Example, seed: int) -> str:
        """Open the screen, and return the task that it shows, "" if the row's prompt asks."""
        raise NotImplementedError

    async def look(self) -> View:
        """Return the present view of the screen."""
        raise NotImplementedError

    async def act(self, action: Action) -> None:
        """Do an action. Raises any exception for one that the screen cannot do; the policy reads
        its message.
        """
        raise NotImplementedError

    async def outcome(self, answer: str | None) -> Step | None:
        """Return the last step if the episode has ended, else None. answer: The policy's answer,
        with which the episode ends in any case; by default it is scored by the configured reward.
        """
        return None if answer is None else scored(await self.context.score(answer, self.row))

    async def reset(self, row: Example, seed: int) -> Observation:
        """Open the screen and show it. Seconds of the episode begin to count."""
        started = time.monotonic()
        shown = await super().reset(row, seed)
        asked = await self.open(row, seed)
        self._seconds -= time.monotonic() - started
        parts = [asked, *await self._seen()] if asked else await self._seen()
        return replace(opening(row, parts), tools=[self._described(one) for one in shown.tools])

    async def step(self, text: str) -> Step:
        """Do the actions of a response, and show the screen unless the episode has ended."""
        step = await self._played(text)
        return replace(step, actions=self.actions)

    async def _played(self, text: str) -> Step:
        started = time.monotonic()
        self._turns -= 1
        self.reply = read_reply(text, self.context.chat)
        shown, counts = await self.results(self.reply)
        self._seconds -= time.monotonic() - started
        answer = self._answer if shown else self.reply.text
        if answer is not None:
            self._end = await self.outcome(answer)
        if self._end is not None:
            return replace(self._end, info={**self._end.info, "counts": counts})
        if not self._turns or self._seconds <= 0:
            counts |= {"out_of_turns": float(not self._turns), "out_of_time": self._seconds <= 0}
            return Step(None, 0.0, True, {"correct": False, "counts": counts})
        last = shown[-1]
        content = [last["content"], *await self._seen()]
        shown[-1] = {**last, "content": [part for part in content if part]}
        return Step(Observation(shown), 0.0, False, {"counts": counts})

    @tool
    async def computer(
        self,
        action: Literal[Kind, "answer"],
        coordinate: Point | None = None,
        to: Point | None = None,
        mark: int | None = None,
        text: str = "",
        amount: float = 1.0,
    ) -> str:
        """Act on the screen, and see it again. action: click, double_click, drag (to another
        place), type (text), key (text: one key, or several joined by + such as ctrl+a), scroll
        (amount: notches of the wheel, upwards if negative), wait (amount: seconds), or answer
        (text: the answer, which ends the task). coordinate and to are places [x, y],
        {coordinates}.
        """
        if action == "answer":
            self._answer = text
            self.actions.append(RecordedAction(action, text=text))
            return ""
        at = self._place(action, coordinate, mark) if action in _PLACED else (0.0, 0.0)
        end = self._place(action, to, None) if action == "drag" else (0.0, 0.0)
        if action in ("type", "key") and not text:
            raise ToolError(f"{action} needs a text")
        if action == "wait":
            amount = min(max(amount, 0.0), MAX_WAIT)
        done = Action(action, at, end, text, amount)
        self.actions.append(self._recorded(done))
        await self.act(done)
        return ""

    async def call(self, call: ToolCall | MalformedCall) -> Content:
        """Make a call, and find out whether it has ended the episode."""
        if self._end is not None or self._answer is not None:
            raise ToolError("the task has ended")
        result = await super().call(call)
        if self._answer is None:  # not within the tool, whose errors are told to the policy
            self._end = await self.outcome(None)
        return result

    async def _seen(self) -> list[str | Image]:
        """Return the screen as parts of a message, and keep what its coordinates mean."""
        started = time.monotonic()
        view = await self.look()
        self._seconds -= time.monotonic() - started
        self._marks, self._file = (view.marks if self._has_marks else ()), view.picture
        with Picture.open(BytesIO(view.picture)) as picture:
            self._size = picture.size
            if self._marks:
                self._file = Image.of(marked(picture.convert("RGB"), self._marks)).data
        return [view.text[:MAX_TEXT], Image(self._file)] if view.text else [Image(self._file)]

    def _place(
        self, action: str, point: Sequence[float] | None, mark: int | None
    ) -> tuple[float, float]:
        """Return a place in pixels of the picture. Raises ToolError if it is not on the screen."""
        if point is None and mark is not None:
            if not 1 <= mark <= len(self._marks):
                raise ToolError(f"there is no mark {mark}; there are {len(self._marks)}")
            left, top, right, bottom = self._marks[mark - 1]
            return (left + right) / 2, (top + bottom) / 2
        if point is None:
            raise ToolError(
                f"{action} needs {'coordinate and to' if action == 'drag' else 'coordinate'}"
            )
        span = (1000, 1000)
        if self._coordinates == "pixels":
            digest = hashlib.sha256(self._file).hexdigest()
            if digest not in self.context.shown_sizes:
                raise ToolError("you have not seen the screen as it is now: wait, then act")
            span = self.context.shown_sizes[digest]
        if not all(0 <= value <= most for value, most in zip(point, span, strict=True)):
            raise ToolError(f"{point} is outside of the screen: it spans [0, 0] to {list(span)}")
        # The far edge belongs to the last pixel.
        x, y = (
            min(value / most * side, side - 1)
            for value, most, side in zip(point, span, self._size, strict=True)
        )
        return x, y

    def _recorded(self, action: Action) -> RecordedAction:
        """Return an action with its places in fractions of the screenshot that the policy saw."""

        def share(place: Sequence[float]) -> list[float]:
            return [value / side for value, side in zip(place, self._size, strict=True)]

        return RecordedAction(
            action.kind,
            hashlib.sha256(self._file).hexdigest(),
            at=share(action.at) if action.kind in _PLACED else (),
            to=share(action.to) if action.kind == "drag" else (),
            text=action.text,
            amount=action.amount if action.kind in ("scroll", "wait") else None,
        )

    def _described(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool as the options make it. Its description has the form of the coordinates,
        and its parameters have marks only where there are any.
        """
        function = shown["function"]
        text = function["description"].replace("{coordinates}", _COORDINATES[self._coordinates])
        parameters = function["parameters"]
        if function["name"] == "computer" and not self._has_marks:
            known = {k: v for k, v in parameters["properties"].items() if k != "mark"}
            parameters = {**parameters, "properties": known}
        elif function["name"] == "computer":
            text += " mark is the number of an element in the screenshot, in place of coordinate."
        return {**shown, "function": {**function, "description": text, "parameters": parameters}}


def marked(picture: Picture.Image, boxes: Sequence[Sequence[float]]) -> Picture.Image:
    """Draw boxes with their numbers, from 1 on, on a picture (set-of-mark, arXiv 2310.11441)."""
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    for number, (left, top, right, bottom) in enumerate(boxes, 1):
        pen.rectangle((left, top, right, bottom), outline="red")
        label = pen.textbbox((left, top), str(number), font)
        pen.rectangle(label, fill="red")
        pen.text((left, top), str(number), "white", font)
    return picture

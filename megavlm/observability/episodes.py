"""Episodes of a sampled group for the report: their turns with images, texts and drawn actions, and
their branches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import hypot
from pathlib import Path
from typing import Any

from megavlm.observability.page import EmbeddedImage
from megavlm.observability.records import Record
from megavlm.observability.text import percent

WIDTH = 1000.0  # of a drawing, whose height follows from its image
RADIUS, HEAD, SCROLL = 24.0, 36.0, 130.0  # of a click, of an arrow's head, of a scroll's arrow
Spans = list[tuple[str, str]]  # class of the style sheet, and text
Read = Callable[[str], "SharedImage | str"]


@dataclass(frozen=True)
class SharedImage:
    """An image that the page holds once and shows in several places, by its number."""

    number: int
    image: EmbeddedImage

    @property
    def height(self) -> float:
        """Height of a drawing on it."""
        return WIDTH * self.image.height / self.image.width


@dataclass(frozen=True)
class Frame:
    """An image that the policy saw, or why it is not shown, with the paths of an SVG drawn on
    it.
    """

    shown: SharedImage | str
    paths: Sequence[str]


@dataclass(frozen=True)
class Turn:
    """A turn of an episode.

    message: Text that the environment showed with the frames. said: What the policy wrote, as
    parts with their titles. actions: Actions in words. unplaced: Actions without a place. reward:
    None if the record has no reward of single turns.
    """

    message: str
    frames: Sequence[Frame]
    said: Sequence[tuple[str, Spans]]
    actions: Sequence[str]
    unplaced: Sequence[str]
    reward: float | None


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode. response: Its record. branches: The turns from the first one to each end."""

    response: Record
    turns: Sequence[Turn]
    branches: Sequence[Sequence[int]]


def has_episodes(group: Record) -> bool:
    """Return True if an environment showed images in a later turn, or a turn has actions."""
    return any(
        turn.get("actions") or (number and turn["images"])
        for response in group["responses"]
        for number, turn in enumerate(_turns(group, response))
    )


def image_names(groups: Sequence[Record]) -> Iterator[str]:
    """Yield the names of the images of groups: the first episode of each group, the second ones,
    and so on, so that a limit on the images leaves whole episodes of all groups.
    """
    for responses in zip_longest(*(group["responses"] for group in groups)):
        for group, response in zip(groups, responses, strict=True):
            for turn in _turns(group, response) if response else ():
                yield from turn["images"]


def played_episodes(
    group: Record, read: Read, colour: Callable[[Record], Spans]
) -> list[PlayedEpisode]:
    """Return the episodes of a group. read: Returns the image of a name, or why it is not shown.
    colour: Returns the text of a turn as spans.
    """
    return [
        _episode(response, _turns(group, response), read, colour) for response in group["responses"]
    ]


def _turns(group: Record, response: Record) -> list[Record]:
    """Return the turns of a response; the first one has the images of the prompt."""
    return [response | {"message": "", "images": group["images"]}, *response.get("turns", ())]


def _episode(
    response: Record, turns: Sequence[Record], read: Read, colour: Callable[[Record], Spans]
) -> PlayedEpisode:
    follows = [
        turn.get("continues", number - 1) if number else None for number, turn in enumerate(turns)
    ]
    ends = sorted(set(range(len(turns))) - set(follows))
    branches = [_branch(end, follows) for end in ends]
    rewards = response.get("rewards", [None] * len(turns))
    played, newest = [], dict[int | None, list[str]]({None: []})
    for number, (turn, reward) in enumerate(zip(turns, rewards, strict=True)):
        # A turn without an image of its own is about the last one that its branch has shown.
        names = turn["images"] or newest[follows[number]]
        newest[number] = names[-1:]
        actions = turn.get("actions", [])
        seen = {Path(name).stem for name in names}
        pointed = {action["image"] for action in actions if "image" in action and "at" in action}
        known = {Path(name).stem: name for one in turns[:number] for name in one["images"]}
        names = [*names, *(known[key] for key in known if key in pointed - seen)]
        played.append(
            Turn(
                # Its images are beside the text, also one that looks as the image before.
                turn["message"].replace("<image>", "").strip() if names else turn["message"],
                [_frame(name, read(name), actions) for name in names],
                _said(colour(turn)),
                [in_words(action) for action in actions],
                [in_words(action) for action in actions if "at" not in action],
                reward,
            )
        )
    return PlayedEpisode({"parts": {}, **response}, played, branches)


def _branch(end: int, follows: Sequence[int | None]) -> list[int]:
    """Return the turns from the first one to `end`. follows: The turn before each turn."""
    before = follows[end]
    return [end] if before is None else [*_branch(before, follows), end]


def _said(spans: Spans) -> list[tuple[str, Spans]]:
    """Return the text of a turn as its thought and its calls, or its answer."""
    text = "".join(text for _, text in spans)
    if (call := text.find("<tool_call>")) >= 0:
        parts = zip(("Thought", "Call"), _cut(spans, call), strict=True)
    else:
        end = text.find("</think>")
        start = 0 if end < 0 else end + len("</think>")
        parts = zip(("Thought", "Answer"), _cut(spans, start), strict=True)
    return [(title, part) for title, part in parts if "".join(t for _, t in part).strip()]


def _cut(spans: Spans, place: int) -> tuple[Spans, Spans]:
    """Cut spans of text after `place` characters."""
    before, after = Spans(), Spans()
    for style, text in spans:
        before.append((style, text[:place]))
        after.append((style, text[place:]))
        place = max(place - len(text), 0)
    return before, after


def _frame(name: str, shown: SharedImage | str, actions: Sequence[Record]) -> Frame:
    drawn = [a for a in actions if "at" in a and a.get("image") == Path(name).stem]
    if isinstance(shown, str):
        return Frame(shown, ())
    return Frame(shown, [drawing(action, shown.height) for action in drawn])


def in_words(action: Mapping[str, Any]) -> str:
    """Return an action in words, with its places in percent of the image."""
    words = [str(action["kind"]).replace("_", " ")]
    if "text" in action:
        words.append(f"“{action['text']}”")
    if "amount" in action:
        words.append(f"{action['amount']:g}")
    at, to = action.get("at", ()), action.get("to", ())
    for word, place in (("at", at[:2]), ("to", at[2:]), ("to", to)):
        if place:
            words.append(f"{word} {', '.join(percent(share, 0) for share in place)}")
    return " ".join(words)


def drawing(action: Mapping[str, Any], height: float) -> str:
    """Return an action with a place as the path of an SVG of WIDTH x `height`: a box, an arrow for
    a drag or a scroll, else circles around the point.
    """
    sides = (WIDTH, height) * 2
    at = [share * side for share, side in zip(action["at"], sides, strict=False)]
    if len(at) == 4:
        left, top, right, bottom = at
        return f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}Z"
    x, y = at
    if "to" in action:
        end_x, end_y = (s * side for s, side in zip(action["to"], sides, strict=False))
        return _circle(x, y, RADIUS / 2) + _arrow(x, y, end_x, end_y)
    if action["kind"] == "scroll":
        length = SCROLL if action.get("amount", 1.0) >= 0 else -SCROLL
        return _arrow(x, y - length / 2, x, y + length / 2)
    rings = (RADIUS / 6, RADIUS, 1.6 * RADIUS)[: 3 if action["kind"] == "double_click" else 2]
    return "".join(_circle(x, y, ring) for ring in rings)


def _circle(x: float, y: float, radius: float) -> str:
    half = f"a{radius:.1f} {radius:.1f} 0 1 0"
    return f"M{x - radius:.1f} {y:.1f}{half} {2 * radius:.1f} 0{half} {-2 * radius:.1f} 0"


def _arrow(x: float, y: float, end_x: float, end_y: float) -> str:
    size = hypot(end_x - x, end_y - y) or 1.0
    across, down = (end_x - x) / size * HEAD, (end_y - y) / size * HEAD
    sides = ((across + down / 2, down - across / 2), (across - down / 2, down + across / 2))
    head = "".join(
        f"M{end_x - dx:.1f} {end_y - dy:.1f}L{end_x:.1f} {end_y:.1f}" for dx, dy in sides
    )
    return f"M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}{head}"

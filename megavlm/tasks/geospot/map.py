"""Geometry of a world map that shows where images were taken and where models placed them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megavlm.evaluation.attempts import Candidate
from megavlm.observability.page import fragment
from megavlm.tasks.geospot.coordinates import Point, named_point
from megavlm.tasks.geospot.reward import read

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 720, 360  # size of land.svg
STYLES = ("c1", "c2")  # classes of the models in the style sheet
TRUTH = "c3"
MAX_CHARS = 500


@dataclass(frozen=True)
class Spot:
    """True place of an image, and the place that each model's first response names (or None)."""

    truth: Point
    answers: Sequence[Point | None]
    label: str


@dataclass(frozen=True)
class Dot:
    """Place in pixels. truth: for an answer, the pixels of the true place; else None."""

    x: float
    y: float
    style: str
    hint: str
    truth: tuple[float, float] | None = None


class LegendEntry(NamedTuple):
    """Entry of the legend."""

    style: str
    label: str


@dataclass(frozen=True)
class WorldMap:
    """Map for map.html. land: an SVG path."""

    dots: Sequence[Dot]
    legend: Sequence[LegendEntry]
    land: str
    meridians: Sequence[tuple[float, str]]
    parallels: Sequence[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT


def evaluation_page(candidates: Sequence[Candidate], names: Sequence[str]) -> str:
    """Return the map as HTML, or "" if no row has a place."""
    found = world_map(spots(candidates), names)
    return "" if found is None else fragment(FOLDER / "map.html", map=found)


def spots(candidates: Sequence[Candidate]) -> list[Spot]:
    """Return the places of the first model's questions whose rows have coordinates."""
    others = [
        {question.row.index: question for question in candidate.questions}
        for candidate in candidates
    ]
    found = []
    for question in candidates[0].questions:
        truth = named_point(question.row.extra)
        if truth is None:
            continue
        answers = [
            _place(of[question.row.index].attempts[0].text) if question.row.index in of else None
            for of in others
        ]
        found.append(Spot(truth, answers, question.row.source))
    return found


def world_map(found: Sequence[Spot], names: Sequence[str]) -> WorldMap | None:
    """Return the map of the places, or None if there are none. names: names of the models."""
    if not found:
        return None
    dots = []
    for spot in found:
        truth = _pixels(spot.truth)
        for style, place in zip(STYLES, spot.answers, strict=False):
            if place is not None:
                dots.append(Dot(*_pixels(place), style, _hint(spot.label, place), truth))
        dots.append(Dot(*truth, TRUTH, _hint(spot.label, spot.truth)))
    used = {dot.style for dot in dots}
    legend = [LegendEntry(TRUTH, "true place"), *map(LegendEntry, STYLES, names)]
    return WorldMap(
        dots,
        [entry for entry in legend if entry.style in used],
        _land(),
        [(_x(lon), f"{lon}°" if lon % 60 == 0 else "") for lon in range(-150, 180, 30)],
        [(_y(lat), f"{lat}°") for lat in range(-60, 90, 30)],
    )


def _place(text: str) -> Point | None:
    # A reward reads the whole text, but in a process with a time limit. There is none here, so only
    # the end of the text is read.
    return read(text[-MAX_CHARS:]).get("point")


def _land() -> str:
    outline = re.search(r' d="([^"]*)"', (FOLDER / "land.svg").read_text())
    assert outline is not None
    return outline[1]


def _x(lon: float) -> float:
    return round((lon + 180) / 360 * WIDTH, 1)


def _y(lat: float) -> float:
    return round((90 - lat) / 180 * HEIGHT, 1)


def _pixels(place: Point) -> tuple[float, float]:
    return _x(place[1]), _y(place[0])


def _hint(label: str, place: Point) -> str:
    return f"{label}: {place[0]:.2f}, {place[1]:.2f}"

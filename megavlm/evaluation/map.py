"""Where images were taken and where models put them: a map as inline SVG."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megavlm.evaluation.attempts import Candidate
from megavlm.rewards.coordinates import Point, on_earth
from megavlm.rewards.geospot import read

_WIDTH, _HEIGHT = 720, 360  # as land.svg has them
_LAND = Path(__file__).with_name("land.svg")
STYLES = ("c1", "c2")  # of models, in the page's style sheet
TRUTH = "c3"
MAX_CHARS = 500


@dataclass(frozen=True)
class Spot:
    """An image's place, and where each model's first attempt put it, if it said."""

    truth: Point
    said: Sequence[Point | None]
    label: str


def spots(candidates: Sequence[Candidate]) -> list[Spot]:
    """Of the questions that the first model was asked and whose rows have lat and lon."""
    others = [
        {question.row.index: question for question in candidate.questions}
        for candidate in candidates
    ]
    found = []
    for question in candidates[0].questions:
        truth = on_earth(question.row.extra.get("lat"), question.row.extra.get("lon"))
        if truth is None:
            continue
        said = [
            _said(of[question.row.index].attempts[0].text) if question.row.index in of else None
            for of in others
        ]
        found.append(Spot(truth, said, question.row.source))
    return found


def world_map(found: Sequence[Spot], names: Sequence[str]) -> str:
    """A figure; "" where there is no spot. names: of the models."""
    if not found:
        return ""
    parts = [
        _land(),
        *(f'<path class="grid" d="M{_x(lon):.1f} 0V{_HEIGHT}"/>' for lon in range(-150, 180, 30)),
        *(f'<path class="grid" d="M0 {_y(lat):.1f}H{_WIDTH}"/>' for lat in range(-60, 90, 30)),
        *(
            f'<text x="{_x(lon) + 2:.1f}" y="{_HEIGHT - 3}">{lon}°</text>'
            for lon in range(-120, 180, 60)
        ),
        *(f'<text x="2" y="{_y(lat) - 2:.1f}">{lat}°</text>' for lat in (-60, -30, 0, 30, 60)),
    ]
    for spot in found:
        for style, said in zip(STYLES, spot.said, strict=False):
            if said is not None:
                ends = f"M{_at(spot.truth)}L{_at(said)}"
                parts.append(f'<path class="line {style}" style="stroke-width:0.7" d="{ends}"/>')
                parts.append(_dot(said, style, 3.0, spot.label))
        parts.append(_dot(spot.truth, TRUTH, 4.5, spot.label))
    shown = [(TRUTH, "where it was taken"), *zip(STYLES, names, strict=False)]
    legend = "".join(f'<span><i class="{style}"></i>{escape(name)}</span>' for style, name in shown)
    return (
        "<figure><figcaption><b>Where</b><small>of each model's first attempt</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Where">{"".join(parts)}'
        f'</svg><div class="legend">{legend}</div></figure>'
    )


def _said(text: str) -> Point | None:
    # A reward reads it in a process with a time limit; here its end must do.
    return read(text[-MAX_CHARS:]).get("point")


def _land() -> str:
    outline = re.search(r' d="([^"]*)"', _LAND.read_text())
    assert outline is not None
    return f'<path class="land" d="{outline[1]}"/>'


def _x(lon: float) -> float:
    return (lon + 180) / 360 * _WIDTH


def _y(lat: float) -> float:
    return (90 - lat) / 180 * _HEIGHT


def _at(place: Point) -> str:
    return f"{_x(place[1]):.1f} {_y(place[0]):.1f}"


def _dot(place: Point, style: str, radius: float, label: str) -> str:
    where = f"{place[0]:.2f}, {place[1]:.2f}"
    return (
        f'<circle class="dot {style}" cx="{_x(place[1]):.1f}" cy="{_y(place[0]):.1f}" '
        f'r="{radius}"><title>{escape(label)}: {where}</title></circle>'
    )

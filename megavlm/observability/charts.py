"""Geometry of small line charts, drawn as SVG by templates/parts.html."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeGuard

from megavlm.observability.text import percent

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 26
_COLUMNS = 100  # steps of a chart that have values on hover; a narrower column is hard to hit


@dataclass(frozen=True)
class Line:
    """Line of a chart. points: (step, value), steps rising; None is a gap. style: a class of the
    style sheet.
    """

    label: str
    style: str
    points: Sequence[tuple[int, float | None]]
    has_markers: bool = False


@dataclass(frozen=True)
class DrawnLine:
    """Line in pixels. path: `d` of an SVG path. markers: (x, y, text shown on hover)."""

    label: str
    style: str
    path: str
    markers: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Chart:
    """Chart in pixels, with its axes. y_ticks: (y, label). x_ticks: (x, step). columns: (x, width,
    text shown on hover), side by side.
    """

    title: str
    note: str
    lines: Sequence[DrawnLine]
    y_ticks: Sequence[tuple[float, str]]
    x_ticks: Sequence[tuple[float, int]]
    columns: Sequence[tuple[float, float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT


def draw_chart(
    title: str, lines: Sequence[Line], *, is_share: bool = False, note: str = ""
) -> Chart | None:
    """Return the chart of the lines, or None if no line has a value. is_share: values in 0..1."""
    steps = [step for line in lines for step, value in line.points if _is_value(value)]
    values = [value for line in lines for _, value in line.points if _is_value(value)]
    if not values:
        return None
    lines = [line for line in lines if any(_is_value(value) for _, value in line.points)]
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        place = (step - first) / max(1, last - first)
        return round(_LEFT + place * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        place = (value - low) / (high - low)
        return round(HEIGHT - _BOTTOM - place * (HEIGHT - _TOP - _BOTTOM), 1)

    def label(value: float) -> str:
        if is_share:
            return percent(value, 0 if ticks[1] - ticks[0] >= 0.01 else 1)
        size = abs(value)
        if size and not 1e-3 <= size < 1e6:
            mantissa, exponent = f"{value:.3e}".split("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:.4g}" if size < 1e4 else f"{value / 1e3:.4g}k"

    def drawn(line: Line) -> DrawnLine:
        marked = line.points if line.has_markers or len(line.points) == 1 else []
        points = [(x(step), y(value)) if _is_value(value) else None for step, value in line.points]
        markers = [
            (x(step), y(value), f"step {step}: {label(value)}")
            for step, value in marked
            if _is_value(value)
        ]
        return DrawnLine(line.label, line.style, _path(points), markers)

    by_line = [dict(line.points) for line in lines]
    known = sorted(set(steps))
    stride = -(-len(known) // _COLUMNS)
    hovered = known[::-stride][::-1]  # the last step is among them
    width = round((WIDTH - _LEFT - _RIGHT) / max(1, len(hovered)), 1)

    def values_at(step: int) -> str:
        found = [
            f"{line.label} {label(value)}"
            for line, points in zip(lines, by_line, strict=True)
            if _is_value(value := points.get(step))
        ]
        return f"step {step}: {', '.join(found)}"

    return Chart(
        title,
        note,
        [drawn(line) for line in lines],
        [(y(tick), label(tick)) for tick in ticks],
        [(x(step), step) for step in sorted({first, (first + last) // 2, last})],
        [(round(x(step) - width / 2, 1), width, values_at(step)) for step in hovered],
    )


def _is_value(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    parts, command = [], "M"
    for point in points:
        if point is None:
            command = "M"
        else:
            parts.append(f"{command}{point[0]} {point[1]}")
            command = "L"
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers that enclose the values."""
    from matplotlib.ticker import MaxNLocator  # late: it takes a moment, and few commands draw

    if high == low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    locator = MaxNLocator(4, steps=[1, 2, 5, 10])
    return [float(tick) for tick in locator.tick_values(low, high)]

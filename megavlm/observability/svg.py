"""Small line charts and bars as SVG and HTML, coloured by the page's style sheet."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10
from typing import TypeGuard

from megavlm.observability.text import number, percent

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 26


@dataclass(frozen=True)
class Line:
    """points: (step, value), steps rising; None is a gap. style: a class of the style sheet."""

    label: str
    style: str
    points: Sequence[tuple[int, float | None]]
    has_markers: bool = False


def chart(title: str, lines: Sequence[Line], *, is_share: bool = False, note: str = "") -> str:
    """A figure with a title, a legend, and the lines; "" if no line has a value."""
    steps = [step for line in lines for step, value in line.points if _is_value(value)]
    values = [value for line in lines for _, value in line.points if _is_value(value)]
    if not values:
        return ""
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(1, last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def label(value: float) -> str:
        if is_share:
            return percent(value, 0 if ticks[1] - ticks[0] >= 0.01 else 1)
        return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else number(value)

    parts = []
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}" class="y">{label(tick)}</text>'
        )
    for step in sorted({first, (first + last) // 2, last}):
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" class="x">{step}</text>')
    for line in lines:
        drawn = [(x(step), y(value)) if _is_value(value) else None for step, value in line.points]
        parts.append(f'<path class="line {line.style}" d="{_path(drawn)}"/>')
        if line.has_markers or len(drawn) == 1:
            for point, (step, value) in zip(drawn, line.points, strict=True):
                if point is not None and _is_value(value):
                    hint = f"<title>step {step}: {label(value)}</title>"
                    center = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}"'
                    parts.append(f'<circle class="dot {line.style}" {center} r="4">{hint}</circle>')
    legend = "".join(
        f'<span><i class="{line.style}"></i>{escape(line.label)}</span>' for line in lines
    )
    caption = f"<small>{escape(note)}</small>" if note else ""
    legend = f'<div class="legend">{legend if len(lines) > 1 else ""}</div>'
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{caption}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>{legend}</figure>"
    )


def bar(share: float, style: str = "c1") -> str:
    """A horizontal bar, share in 0..1 of the cell's width."""
    width = 100 * min(1.0, max(0.0, share))
    return f'<span class="bar"><i class="{style}" style="width:{width:.1f}%"></i></span>'


def _is_value(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    parts, command = [], "M"
    for point in points:
        if point is None:
            command = "M"
        else:
            parts.append(f"{command}{point[0]:.1f} {point[1]:.1f}")
            command = "L"
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose the values."""
    if high == low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    step = 10.0 ** floor(log10((high - low) / 3))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= 4:
            step *= factor
            break
    start = floor(low / step)
    ticks = [start * step]
    while ticks[-1] < high - 1e-9 * step:
        ticks.append((start + len(ticks)) * step)
    return ticks

"""Reward curve of a run in characters, for a terminal or a log."""

from collections.abc import Sequence
from itertools import pairwise

WIDTH, HEIGHT = 64, 8  # size of the area for bars
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_chart(values: Sequence[tuple[int, float]], title: str) -> str:
    """Return a bar chart of (step, value), steps rising. If there are more values than columns,
    neighbours share a bar, which shows their mean.
    """
    count = min(len(values), WIDTH)
    bounds = [len(values) * column // count for column in range(count + 1)]
    parts = [[value for _, value in values[a:b]] for a, b in pairwise(bounds)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(0.0, *means), max(means)
    scale = 8 * HEIGHT / (high - low) if high > low else 0.0
    eighths = [max(1, round((mean - low) * scale)) for mean in means]
    wide = WIDTH // count
    lines = [title]
    for row in reversed(range(HEIGHT)):
        bars = "".join(_EIGHTHS[min(max(n - 8 * row, 0), 8)] * wide for n in eighths)
        label = {HEIGHT - 1: f"{high:.3g}", 0: f"{low:.3g}"}.get(row, "")
        lines.append(f"{label:>7} ┤{bars.rstrip()}")
    first, last = f"step {values[0][0]}", str(values[-1][0])
    lines.append(f"{'':9}{first}{last:>{max(count * wide - len(first), len(last) + 1)}}")
    return "\n".join(lines)

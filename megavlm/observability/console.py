"""Console output of a run: one line per step, and closing tables."""

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megavlm.observability.result import category_rows
from megavlm.observability.text import duration, number, percent, points

WIDTH = 120

LEGEND = (
    "acc: correct responses · len: tokens per response · cut: responses ended by length\n"
    "flat: groups without signal · kl: to the reference · ent: entropy\n"
    "gap: largest log-prob difference of rollout and trainer · grad: norm before clipping"
)


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


def _short(value: float) -> str:
    return number(value, digits=2)


# (metric, text before the value, format, text after it), in the order of the line.
_FIELDS: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
    ("loss", " loss ", number, ""),
    ("reward", " reward ", lambda value: f"{value:.3f}", ""),
    ("accuracy", "acc ", _share, ""),
    ("response_length", " len ", _short, ""),
    ("truncated_share", "cut ", _share, ""),
    ("groups_without_signal", "flat ", _share, ""),
    ("kl_reference", " kl ", _short, ""),
    ("entropy", "ent ", _short, ""),
    ("rollout_max_difference", "gap ", _short, ""),
    ("gradient_norm", " grad ", _short, ""),
    ("learning_rate", "lr ", _short, ""),
    ("seconds/total", " ", _short, "s"),
    ("tokens_per_second", "", _short, " tok/s"),
)
# Metrics to leave out, in this order, where a line would be longer than WIDTH.
_SPARE = ("rollout_max_difference", "entropy", "response_length", "accuracy")


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step in at most WIDTH columns, without metrics that it did not log."""
    hidden = set()
    if "reward" in metrics:
        # The value of a policy loss means nothing to a reader; the learning rate is in the report.
        hidden = {"loss", "learning_rate"}
    if metrics.get("truncated_share") == 0:
        hidden.add("truncated_share")
    for spare in ("", *_SPARE):
        hidden.add(spare)
        parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
        for name, before, form, after in _FIELDS:
            if name in metrics and name not in hidden:
                parts.append(before + form(metrics[name]) + after)
        line = " ".join(parts)
        if len(line) <= WIDTH:
            break
    return line


def print_closing(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the closing tables of a run. result: of `result.build_result`."""
    (console or Console()).print(closing(result))


def closing(result: Mapping[str, Any]) -> RenderableType:
    """Return accuracy by category, the conclusion, time by phase, and the output files."""
    parts: list[RenderableType] = []
    if result["evaluation_after"] or result["evaluation_before"]:
        parts.append(_accuracy_table(result))
    if result["conclusion"]:
        style = "bold green" if result["gain_is_visual"] else "bold yellow"
        parts.append(Text(result["conclusion"] + "\n", style=style))
    parts.append(_phase_table(result["seconds_by_phase"]))
    if result["paths"]:
        files = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        files.add_column(style="dim", no_wrap=True)
        # Folded, never cut: paths are copied.
        files.add_column(overflow="fold")
        for name, path in result["paths"].items():
            files.add_row(escape(name), escape(str(path)))
        parts.append(files)
    return Group(*parts)


def _accuracy_table(result: Mapping[str, Any]) -> Table:
    steps, seed = result["steps"], result["seed"]
    title = f"Accuracy on the test split in percent, seed {seed}, {steps} steps"
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=True,
    )
    # Narrow enough for 80 columns, or for a log.
    table.add_column("category", overflow="fold")
    for name in ("rows", "before", "after", "gain", "sampled", "valid", "blind", "shuffled"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = category_rows(result)
    for row in rows:
        is_last = row is rows[-1]
        gain = None if row.before is None or row.after is None else row.after - row.before
        table.add_row(
            escape(row.category),
            str(row.count),
            _points(row.before),
            _points(row.after),
            "-" if gain is None else points(gain),
            *map(_points, (row.sampled, row.valid, row.blind, row.shuffled)),
            style="bold" if is_last else None,
            end_section=len(rows) > 1 and row is rows[-2],
        )
    interval = rows[-1].interval
    if interval is not None:
        low, high = interval
        table.caption = f"95 % interval of the last accuracy: {percent(low)} to {percent(high)}"
        table.caption_justify = "left"
    return table


def _points(share: float | None) -> str:
    return percent(share).removesuffix(" %")


def _phase_table(seconds: Mapping[str, float]) -> Table:
    table = Table(
        title="Time by phase", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold"
    )
    table.add_column("phase")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    total = sum(seconds.values())
    for phase, value in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(escape(phase), duration(value), percent(value / total if total else None))
    table.add_section()
    table.add_row("all", duration(total), "", style="bold")
    return table

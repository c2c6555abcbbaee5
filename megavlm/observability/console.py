"""Console output of a run: one line per step, and closing tables."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megavlm.observability.phases import phase_shares
from megavlm.observability.progress import Output
from megavlm.observability.result import category_rows
from megavlm.observability.terminal_chart import terminal_chart
from megavlm.observability.text import duration, number, percent, points

WIDTH = 120


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


def _short(value: float) -> str:
    return number(value, digits=2)


@dataclass(frozen=True)
class _Field:
    """Part of a step's line. meaning: its explanation in the legend."""

    metric: str
    label: str
    form: Callable[[float], str]
    meaning: str
    unit: str = ""


# They are listed in the order in which they appear in the line.
_FIELDS = (
    _Field("loss", "loss", number, "training loss"),
    _Field("reward", "reward", lambda value: f"{value:.3f}", "mean of the step's responses"),
    _Field("accuracy", "correct", _share, "correct responses"),
    _Field("preference/accuracy", "right", _share, "pairs whose chosen response gains more"),
    _Field("preference/margin", "margin", _short, "reward of chosen over rejected responses"),
    _Field("response_length", "length", _short, "tokens per response"),
    _Field("truncated_share", "cut off", _share, "responses ended by the token limit"),
    _Field(
        "groups_without_signal",
        "no signal",
        _share,
        "prompts whose responses all have the same reward, from which nothing is learnt",
    ),
    _Field("kl_reference", "KL", _short, "distance from the model before training, nats per token"),
    _Field("entropy", "entropy", _short, "of the next token, in nats; near 0 nothing is tried"),
    _Field(
        "rollout_max_difference",
        "mismatch",
        _short,
        "largest difference of a token's log-prob between server and trainer",
    ),
    _Field("gradient_norm", "gradient", _short, "its norm before clipping"),
    _Field("learning_rate", "lr", _short, "learning rate"),
    _Field("seconds/total", "", _short, "duration of the step", "s"),
    _Field("tokens_per_second", "", _short, "tokens trained on per second", " tok/s"),
)
# Metrics that are left out, in this order, if a line would be longer than WIDTH.
_SPARE = ("rollout_max_difference", "entropy", "response_length", "accuracy")


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step in at most WIDTH columns, without metrics that it did not log."""
    fields = _fields(metrics)
    for spare in ("", *_SPARE):
        fields = [field for field in fields if field.metric != spare]
        parts = [
            f"{field.label} {field.form(metrics[field.metric])}{field.unit}".lstrip()
            for field in fields
        ]
        line = "  ".join([f"step {step:>{len(str(num_steps))}}/{num_steps}", *parts])
        if len(line) <= WIDTH:
            break
    return line


def legend(metrics: Mapping[str, float]) -> str:
    """Return a legend that explains a step's line, at most WIDTH columns wide."""
    # The legend is printed once, and a later step may log a share that is 0 now.
    shown = {name: value or 1.0 for name, value in metrics.items()}
    words = [f"{field.label or field.unit.strip()}: {field.meaning}" for field in _fields(shown)]
    text = "Each step: " + "; ".join(words) + ". All metrics: docs/reference/metrics.md"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


# Further metrics of `metric_rows`: (label, metric). They are shown if they are not 0.
_OTHERS = (
    ("MFU", "mfu"),
    ("FLOP/s", "flops_per_second"),
    ("memory, GiB", "memory_gib"),
    ("servers with weights", "sync_servers"),
    ("seconds servers idle", "servers_idle"),
    ("skipped updates", "skipped_updates"),
    ("failed rewards", "reward_failures"),
    ("rows skipped", "skipped_bad"),
    ("records not written", "recording_failures"),
    ("tracker failures", "tracker_failures"),
)


def metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, Callable[[float], str]]]:
    """Return label, metric and format of a step's metrics of interest, in order."""
    rows = [(field.label or field.meaning, field.metric, field.form) for field in _fields(metrics)]
    return rows + [(label, name, number) for label, name in _OTHERS if metrics.get(name)]


def _fields(metrics: Mapping[str, float]) -> list[_Field]:
    """Return the parts of a step's line, without uninformative ones."""
    hidden = set()
    if "reward" in metrics:
        # The value of a policy loss tells a reader nothing; the learning rate is in the report.
        hidden = {"loss", "learning_rate"}
    if metrics.get("truncated_share") == 0:
        hidden.add("truncated_share")
    return [field for field in _FIELDS if field.metric in metrics and field.metric not in hidden]


def print_closing(
    result: Mapping[str, Any], rewards: Sequence[tuple[int, float]], console: Console | None = None
) -> None:
    """Print the reward curve of a run, accuracy by category, the conclusion, time by phase, and the
    output files.

    result: Result of `result.build_result`. rewards: Points (step, reward) of the curve.
    """
    parts: list[RenderableType] = []
    if len(rewards) > 1:
        parts.append(Text(terminal_chart(rewards, "Reward per step") + "\n", no_wrap=True))
    if result["evaluation_after"] or result["evaluation_before"]:
        parts.append(_accuracy_table(result))
    if result["conclusion"]:
        style = "bold green" if result["gain_is_visual"] else "bold yellow"
        parts.append(Text(result["conclusion"] + "\n", style=style))
    parts.append(_phase_table(result["seconds_by_phase"]))
    if result["paths"]:
        files = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        files.add_column(style="dim", no_wrap=True)
        # Long paths are folded and never cut, because users copy them.
        files.add_column(overflow="fold")
        for name, path in result["paths"].items():
            files.add_row(escape(name), escape(str(path)))
        parts.append(files)
    (console or Output()).print(Group(*parts))


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
    # The columns are narrow enough for 80 columns or a log.
    table.add_column("category", overflow="fold")
    for name in ("rows", "before", "after", "gain", "sampled", "valid", "blind", "shuffled"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = category_rows(result)
    for row in rows:
        is_last = row is rows[-1]
        table.add_row(
            escape(row.category),
            str(row.count),
            _points(row.before),
            _points(row.after),
            points(row.gain),
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
    for phase, value, share in phase_shares(seconds):
        table.add_row(escape(phase), duration(value), percent(share))
    table.add_section()
    table.add_row("all", duration(sum(seconds.values())), "", style="bold")
    return table

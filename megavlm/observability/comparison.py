"""comparison.html of several runs: their curves in one chart each, last values, and the keys in
which their configurations differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megavlm.observability.charts import Line, draw_chart
from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE
from megavlm.observability.page import render
from megavlm.observability.plots import moving_mean, window_of
from megavlm.observability.records import Record, read_records
from megavlm.observability.report import CONFIG_FILE
from megavlm.observability.text import duration, number, percent, short_names
from megavlm.writing import write_whole

STYLES = ("c1", "c2", "c3", "c4", "pale", "dash")  # style of each run's lines
# Title and metric of the charts.
CHARTS = (
    ("Reward", "reward"),
    ("Correct responses", "accuracy"),
    ("Loss", "loss"),
    ("KL to the reference", "kl_reference"),
    ("Entropy", "entropy"),
    ("Response length", "response_length"),
    ("Gradient norm", "gradient_norm"),
    ("Tokens per second", "tokens_per_second"),
)
HEAD = ("run", "steps", "reward", "correct", "greedy", "KL", "length", "step", "tokens/s")
MEAN = 20  # number of last steps over which the table's values are means


def write_comparison(run_dirs: Sequence[Path], path: Path) -> None:
    """Write the page of two to six runs. Raises ValueError for more."""
    if len(run_dirs) > len(STYLES):
        raise ValueError(
            f"{len(run_dirs)} runs are more than the {len(STYLES)} that a chart shows: name fewer"
        )
    names = short_names([str(folder.resolve()) for folder in run_dirs])
    metrics = [read_records(folder / METRICS_FILE) for folder in run_dirs]
    charts = [
        draw_chart(
            title,
            [
                Line(run, style, _curve(records, name))
                for run, style, records in zip(names, STYLES, metrics, strict=False)
            ],
            note="moving mean",
        )
        for title, name in CHARTS
    ]
    evaluations = [read_records(folder / EVALUATIONS_FILE) for folder in run_dirs]
    page = render(
        "comparison.html",
        title=", ".join(names),
        head=HEAD,
        rows=[_row(*item) for item in zip(names, metrics, evaluations, strict=True)],
        charts=[chart for chart in charts if chart is not None],
        keys_head=["key", *names],
        keys=_differences([folder / CONFIG_FILE for folder in run_dirs]),
    )
    write_whole(path, page)


def _curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    means = moving_mean([value for _, value in points], window_of(len(points)))
    return list(zip((step for step, _ in points), means, strict=True))


def _row(name: str, records: Sequence[Record], evaluations: Sequence[Record]) -> list[object]:
    def mean(metric: str) -> float | None:
        values = [r[metric] for r in records[-MEAN:] if r.get(metric) is not None]
        return sum(values) / len(values) if values else None

    def shown(metric: str) -> str:
        value = mean(metric)
        return "-" if value is None else number(value)

    measured = [e["greedy"]["overall"]["share"] for e in evaluations if e.get("greedy")]
    seconds = mean("seconds/total")
    return [
        name,
        len(records),
        shown("reward"),
        percent(mean("accuracy")),
        percent(measured[-1] if measured else None),
        shown("kl_reference"),
        shown("response_length"),
        "-" if seconds is None else duration(seconds),
        shown("tokens_per_second"),
    ]


def _differences(files: Sequence[Path]) -> list[list[str]]:
    """Return each key whose value is not the same in all configurations, with its values. run.dir
    is left out.
    """
    flat = [_flat(OmegaConf.to_container(OmegaConf.load(f))) if f.exists() else {} for f in files]
    keys = sorted(set().union(*flat) - {"run.dir"})
    rows = [[key, *(values.get(key, "-") for values in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(values, Mapping) or not values:
        return {prefix: str(values)}
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found

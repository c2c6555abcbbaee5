"""report.html: one self-contained page about a run (see page.py)."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE
from megavlm.observability.page import page
from megavlm.observability.plots import moving_mean, window_of
from megavlm.observability.records import Record, read_records, write_whole
from megavlm.observability.report_samples import samples_section
from megavlm.observability.report_style import SCRIPT
from megavlm.observability.result import RESULT_FILE, category_rows
from megavlm.observability.svg import Line, bar, chart
from megavlm.observability.text import duration, percent, points

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"


def write_report(run_dir: Path | str) -> Path:
    """Writes report.html from what the run has left so far, leaving out what is not there."""
    run_dir = Path(run_dir)
    path = run_dir / RESULT_FILE
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    metrics = read_records(run_dir / METRICS_FILE)
    evaluations = read_records(run_dir / EVALUATIONS_FILE)
    name = run_dir.resolve().name
    body = "".join(
        [
            f"<h1>Run {escape(name)}</h1>",
            f'<p class="sub">{escape(_subtitle(metrics, result))}</p>',
            _summary(result) if result else "",
            _accuracy_table(result) if result else "",
            _charts(metrics, evaluations),
            _phases(result["seconds_by_phase"]) if result else "",
            samples_section(run_dir),
            _paths(result["paths"]) if result else "",
            _configuration(run_dir / CONFIG_FILE),
        ]
    )
    path = run_dir / REPORT_FILE
    write_whole(path, page(name, body, script=SCRIPT).encode("utf-8"))
    return path


def _subtitle(metrics: list[Record], result: Mapping[str, Any] | None) -> str:
    parts = [f"{len(metrics)} steps recorded"]
    if result:
        parts.append(f"seed {result['seed']}")
        parts.append(f"{duration(sum(result['seconds_by_phase'].values()))} in all phases")
    return " · ".join(parts)


def _summary(result: Mapping[str, Any]) -> str:
    rows = category_rows(result)
    if not rows:
        return ""
    last = rows[-1]
    tiles = [
        (percent(last.before), "accuracy before"),
        (percent(last.after), "accuracy after"),
        (percent(last.shuffled), "with shuffled images"),
        (percent(last.blind), "blind baseline"),
        (percent(last.sampled), "sampled accuracy"),
        (percent(last.valid), "valid form"),
    ]
    if last.before is not None and last.after is not None:
        tiles.insert(2, (f"{points(last.after - last.before)}", "points gained"))
    cards = "".join(
        f'<div class="card"><b>{value}</b><span>{label}</span></div>'
        for value, label in tiles
        if value != "-"
    )
    if not result["conclusion"]:
        return f'<div class="tiles">{cards}</div>'
    style = "card verdict yes" if result["gain_is_visual"] else "card verdict"
    return (
        f'<div class="tiles">{cards}</div><div class="{style}">{escape(result["conclusion"])}</div>'
    )


def _accuracy_table(result: Mapping[str, Any]) -> str:
    rows = category_rows(result)
    if not rows:
        return ""
    names = (
        "category",
        "questions",
        "before",
        "after",
        "gain",
        "95 % interval",
        "sampled",
        "valid form",
    )
    head = "".join(f"<th>{name}</th>" for name in (*names, "blind", "shuffled"))
    lines = []
    for row in rows:
        gain = "-" if row.before is None or row.after is None else points(row.after - row.before)
        interval = (
            "-" if row.interval is None else " to ".join(percent(end) for end in row.interval)
        )
        shares = (row.sampled, row.valid, row.blind, row.shuffled)
        cells = [
            row.count,
            percent(row.before),
            percent(row.after),
            gain,
            interval,
            *map(percent, shares),
        ]
        style = ' class="all"' if row is rows[-1] else ""
        lines.append(f"<tr{style}><td>{escape(row.category)}</td>{_cells(cells)}</tr>")
    return (
        "<h2>Accuracy on the test split</h2>"
        f'<div class="card wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
    )


def _charts(metrics: list[Record], evaluations: list[Record]) -> str:
    def line(label: str, style: str, name: str) -> Line:
        values = [(record["step"], record[name]) for record in metrics if name in record]
        return Line(label, style, values)

    def measure(label: str, style: str, name: str) -> Line:
        values = [
            (record["step"], record[name]["overall"]["share"])
            for record in evaluations
            if record[name]
        ]
        return Line(label, style, values, has_markers=True)

    reward = [(r["step"], r["reward"]) for r in metrics if r.get("reward") is not None]
    window = window_of(len(reward))
    means = moving_mean([value for _, value in reward], window)
    mean_line = list(zip((step for step, _ in reward), means, strict=True))
    figures = [
        chart(
            "Reward",
            [Line("per step", "pale", reward), Line(f"mean of {window} steps", "c1", mean_line)],
            note="of the sampled responses",
        ),
        chart(
            "Test accuracy",
            [
                measure("greedy", "c2", "greedy"),
                measure("sampled", "c4", "sampled"),
                measure("shuffled", "c3", "shuffled"),
                measure("blind", "dash", "blind"),
            ],
            is_share=True,
        ),
        chart(
            "Reward by category",
            [
                line(name.partition("/")[2], style, name)
                for name, style in zip(
                    sorted({n for record in metrics for n in record if n.startswith("reward/")}),
                    ("c1", "c2", "c3", "c4"),
                    strict=False,
                )
            ],
        ),
        chart("Loss", [line("loss", "c1", "loss")], note="mean over updates"),
        chart("KL to the reference", [line("kl", "c1", "kl_reference")], note="nats per token"),
        chart("Entropy", [line("entropy", "c1", "entropy")], note="nats per token"),
        chart(
            "Shares",
            [
                line("groups without signal", "c1", "groups_without_signal"),
                line("truncated", "c2", "truncated_share"),
                line("clipped tokens", "c3", "clip_share"),
            ],
            is_share=True,
        ),
        chart("Response length", [line("tokens", "c1", "response_length")], note="tokens"),
        chart(
            "Rollout-trainer gap",
            [line("largest log-prob difference", "c1", "rollout_max_difference")],
            note="largest, nats",
        ),
        chart("Gradient norm", [line("norm", "c1", "gradient_norm")], note="before clipping"),
        chart("Learning rate", [line("rate", "c1", "learning_rate")]),
        chart("Tokens per second", [line("tokens", "c1", "tokens_per_second")]),
    ]
    drawn = "".join(figures)
    return f'<h2>Training</h2><div class="charts">{drawn}</div>' if drawn else ""


def _phases(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    if not total:
        return ""
    lines = "".join(
        f"<tr><td>{escape(phase)}</td>{_cells([duration(value), percent(value / total)])}"
        f'<td style="width:55%">{bar(value / total)}</td></tr>'
        for phase, value in sorted(seconds.items(), key=lambda item: -item[1])
    )
    return f'<h2>Time by phase</h2><div class="card wide"><table>{lines}</table></div>'


def _paths(paths: Mapping[str, str]) -> str:
    if not paths:
        return ""
    lines = "".join(
        f'<tr><td>{escape(name)}</td><td class="left"><code>{escape(str(path))}</code></td></tr>'
        for name, path in paths.items()
    )
    return f'<h2>Where everything lies</h2><div class="card wide"><table>{lines}</table></div>'


def _configuration(path: Path) -> str:
    if not path.exists():
        return ""
    text = escape(path.read_text(encoding="utf-8"))
    return (
        '<h2>Configuration</h2><details class="card"><summary>The resolved recipe</summary>'
        f"<pre>{text}</pre></details>"
    )


def _cells(values: Iterable[object]) -> str:
    return "".join(f"<td>{value}</td>" for value in values)

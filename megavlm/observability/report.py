"""report.html of a run: accuracy, charts, time by phase, sampled rollouts, configuration."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import log
from pathlib import Path
from typing import Any

from PIL import Image

from megavlm.observability.charts import Chart, Line, draw_chart
from megavlm.observability.episodes import (
    SharedImage,
    has_episodes,
    image_names,
    played_episodes,
)
from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE
from megavlm.observability.page import MAX_SIDE, EmbeddedImage, embed, render
from megavlm.observability.phases import phase_shares
from megavlm.observability.plots import moving_mean, window_of
from megavlm.observability.records import Record, read_records
from megavlm.observability.result import RESULT_FILE, CategoryRow, category_rows
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER
from megavlm.observability.text import duration, percent, points, shorten
from megavlm.writing import write_whole

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"
ACCURACY_HEAD = (
    "category",
    "questions",
    "before",
    "after",
    "gain",
    "95 % interval",
    "sampled",
    "valid form",
    "blind",
    "shuffled",
)
# Limits on the size of the page. LIMITS: characters of texts, and responses of a group.
MAX_STEPS = 24
MAX_IMAGE_BYTES = 12_000_000
SCREEN_SIDE = 768  # pixels of a screenshot, whose texts must be legible
# Probabilities below which a token gets a class of the style sheet, the lowest first.
STYLES = ((0.2, "p3"), (0.5, "p2"), (0.8, "p1"))
LIMITS = {"prompt": 2000, "response": 1200, "responses": 32}


def write_report(run_dir: Path | str) -> Path:
    """Write report.html from the files that a run has written so far, and return its path."""
    run_dir = Path(run_dir)
    path = run_dir / RESULT_FILE
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    metrics = read_records(run_dir / METRICS_FILE)
    rows = category_rows(result) if result else []
    configuration = run_dir / CONFIG_FILE
    images = _Images(run_dir / SAMPLES_FOLDER)
    page = render(
        "report.html",
        title=run_dir.resolve().name,
        script="report.js",
        subtitle=_subtitle(metrics, result),
        result=result,
        tiles=_tiles(rows[-1]) if rows else [],
        accuracy_head=ACCURACY_HEAD,
        accuracy=[_cells(row) for row in rows],
        charts=_charts(metrics, read_records(run_dir / EVALUATIONS_FILE)),
        phases=phase_shares(result["seconds_by_phase"]) if result else [],
        steps=sampled_steps(run_dir, images),
        shared_images=images.shared_images,
        limits=LIMITS,
        configuration=configuration.read_text("utf-8") if configuration.exists() else None,
    )
    path = run_dir / REPORT_FILE
    write_whole(path, page)
    return path


def _subtitle(metrics: Sequence[Record], result: Mapping[str, Any] | None) -> str:
    parts = [f"{len(metrics)} steps recorded"]
    if result:
        parts.append(f"seed {result['seed']}")
        parts.append(f"{duration(sum(result['seconds_by_phase'].values()))} in all phases")
    return " · ".join(parts)


def _tiles(row: CategoryRow) -> list[tuple[str, str]]:
    tiles = [
        (percent(row.before), "accuracy before"),
        (percent(row.after), "accuracy after"),
        (points(row.gain), "points gained"),
        (percent(row.shuffled), "with shuffled images"),
        (percent(row.blind), "blind baseline"),
        (percent(row.sampled), "sampled accuracy"),
        (percent(row.valid), "valid form"),
    ]
    return [(value, label) for value, label in tiles if value != "-"]


def _cells(row: CategoryRow) -> list[object]:
    interval = "-" if row.interval is None else " to ".join(percent(end) for end in row.interval)
    shares = map(percent, (row.sampled, row.valid, row.blind, row.shuffled))
    before, after = percent(row.before), percent(row.after)
    return [row.category, row.count, before, after, points(row.gain), interval, *shares]


def _charts(metrics: Sequence[Record], evaluations: Sequence[Record]) -> list[Chart]:
    def line(label: str, style: str, name: str) -> Line:
        values = [(record["step"], record[name]) for record in metrics if name in record]
        return Line(label, style, values)

    def measure(style: str, name: str) -> Line:
        values = [
            (record["step"], record[name]["overall"]["share"])
            for record in evaluations
            if record[name]
        ]
        return Line(name, style, values, has_markers=True)

    reward = [(r["step"], r["reward"]) for r in metrics if r.get("reward") is not None]
    window = window_of(len(reward))
    means = moving_mean([value for _, value in reward], window)
    mean_line = list(zip((step for step, _ in reward), means, strict=True))
    categories = sorted({n for record in metrics for n in record if n.startswith("reward/")})
    charts = [
        draw_chart(
            "Reward",
            [Line("per step", "pale", reward), Line(f"mean of {window} steps", "c1", mean_line)],
            note="of the sampled responses",
        ),
        draw_chart(
            "Test accuracy",
            [
                measure("c2", "greedy"),
                measure("c4", "sampled"),
                measure("c3", "shuffled"),
                measure("dash", "blind"),
            ],
            is_share=True,
        ),
        draw_chart(
            "Reward by category",
            [
                line(name.partition("/")[2], style, name)
                for name, style in zip(categories, ("c1", "c2", "c3", "c4"), strict=False)
            ],
        ),
        draw_chart("Loss", [line("loss", "c1", "loss")], note="mean over updates"),
        draw_chart(
            "KL to the reference", [line("kl", "c1", "kl_reference")], note="nats per token"
        ),
        draw_chart("Entropy", [line("entropy", "c1", "entropy")], note="nats per token"),
        draw_chart(
            "Shares",
            [
                line("groups without signal", "c1", "groups_without_signal"),
                line("truncated", "c2", "truncated_share"),
                line("clipped tokens", "c3", "clip_share"),
            ],
            is_share=True,
        ),
        draw_chart("Response length", [line("tokens", "c1", "response_length")], note="tokens"),
        draw_chart(
            "Rollout-trainer gap",
            [line("largest log-prob difference", "c1", "rollout_max_difference")],
            note="largest, nats",
        ),
        draw_chart("Gradient norm", [line("norm", "c1", "gradient_norm")], note="before clipping"),
        draw_chart("Learning rate", [line("rate", "c1", "learning_rate")]),
        draw_chart("Tokens per second", [line("tokens", "c1", "tokens_per_second")]),
    ]
    return [chart for chart in charts if chart is not None]


def sampled_steps(run_dir: Path, images: "_Images") -> list[tuple[int, list[Record]]]:
    """Return up to MAX_STEPS steps with their groups.

    `shown` of a group, and of each later turn of a response, holds the images, or the reason why
    one is not shown. A group whose environment showed images has `episodes` instead.
    """
    records = read_records(run_dir / SAMPLES_FOLDER / SAMPLES_FILE)
    steps = [(step, list(groups)) for step, groups in groupby(records, lambda r: r["step"])]
    steps, found = _evenly(steps, MAX_STEPS), []
    for number, (step, groups) in enumerate(steps, 1):
        images.allow(number / len(steps))
        groups = [g | {"responses": g["responses"][: LIMITS["responses"]]} for g in groups]
        for name in image_names([group for group in groups if has_episodes(group)]):
            images.share(name)
        found.append((step, [_shown(group, images) for group in groups]))
    return found


def _shown(group: Record, images: "_Images") -> Record:
    """Return a group with its images and the texts of its turns as the page shows them."""
    if has_episodes(group):
        return group | {"shown": [], "episodes": played_episodes(group, images.share, _coloured)}

    def shown(item: Record) -> Record:
        return item | {"shown": [images.read(name) for name in item["images"]]}

    return shown(group) | {"responses": _responses(group, shown), "episodes": []}


def _coloured(turn: Record) -> list[tuple[str, str]]:
    """Return the text of a turn as spans, of which there is one if no tokens were kept."""
    limit = LIMITS["response"]
    return spans(turn, limit) or [("", shorten(turn["text"], limit))]


def _responses(group: Record, shown: Callable[[Record], Record]) -> list[Record]:
    """Return the responses to show, each with its turns. The first turn has no message, because the
    group's prompt is shown above it.
    """
    found = []
    for response in group["responses"]:
        first = {"text": response["text"], "tokens": response.get("tokens", [])}
        turns = [first, *map(shown, response.get("turns", ()))]
        coloured = [turn | {"spans": spans(turn, LIMITS["response"])} for turn in turns]
        found.append({"parts": {}, **response, "turns": coloured})
    return found


def spans(turn: Mapping[str, Any], limit: int) -> list[tuple[str, str]]:
    """Return the text of a turn as spans (class, text) by the probability of its tokens, as far as
    tokens were kept. The spans have at most `limit` characters; there are none without tokens. The
    token that ends the turn is left out, as it is in the text.
    """
    found: list[tuple[str, str]] = []
    tokens = turn.get("tokens", ())
    if tokens and tokens[-1][0].strip() not in turn["text"]:
        tokens = tokens[:-1]
    for text, logprob in tokens:
        style = next((style for low, style in STYLES if logprob < log(low)), "")
        if found and found[-1][0] == style:
            found[-1] = style, found[-1][1] + text
        else:
            found.append((style, text))
    if not found:
        return []
    known = "".join(text for _, text in found).lstrip()
    if turn["text"].startswith(known):  # some tokens may not have been kept
        found.append(("", turn["text"][len(known) :]))
    cut, left = [], limit
    for style, text in found:
        if left > 0 and text:
            cut.append((style, shorten(text, left)))
        left -= len(text)
    return cut


class _Images:
    """Embedded images, of at most MAX_IMAGE_BYTES. Further ones are left out.

    shared_images: The images that the page holds once, in the order of their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_bytes, self._most = 0, float(MAX_IMAGE_BYTES)
        self._shared: dict[str, SharedImage] = {}
        self._is_full = False  # True: no further shared image is read, which takes time

    @property
    def shared_images(self) -> list[SharedImage]:
        return list(self._shared.values())

    def allow(self, share: float) -> None:
        """Admit images up to a share of MAX_IMAGE_BYTES, so that some are left for later steps."""
        self._most, self._is_full = share * MAX_IMAGE_BYTES, False

    def share(self, name: str) -> SharedImage | str:
        """Return an image that the page shows in several places, or why it is not shown."""
        if name not in self._shared:
            image = self.read(name, SCREEN_SIDE, "WEBP") if not self._is_full else _left_out(name)
            if isinstance(image, str):
                self._is_full |= image == _left_out(name)
                return image
            self._shared[name] = SharedImage(len(self._shared), image)
        return self._shared[name]

    def read(self, name: str, side: int = MAX_SIDE, form: str = "JPEG") -> EmbeddedImage | str:
        """Return an image for one place, or why it is not shown. side, form: See `embed`."""
        path = self._folder / Path(name).name
        if not path.exists():
            return "image is no longer there"
        with Image.open(path) as image:
            embedded = embed(image, side, form)
        if self._num_bytes + len(embedded.uri) > self._most:
            return _left_out(name)
        self._num_bytes += len(embedded.uri)
        return embedded


def _left_out(name: str) -> str:
    return f"left out for size: {name}"


def _evenly(items: list[Any], count: int) -> list[Any]:
    """Return at most `count` of the items, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]

"""Cost of training on a group against its size, its prompt's length and its images: measured, and
modelled by `megavlm/models/cost.py`.

`python -m tests.benchmarks.bench_trl.curve` writes its part of RESULTS.md and docs/images/cost.svg.

Forward and backward of megavlm's tree, and of transformers' batch of separate sequences, on which
TRL trains. Seconds are of one processor, so that other work changes little. The model counts FLOPs:
forward and backward of the language model are three forwards, a frozen tower is one; megavlm has
the prompt and its images once, transformers once a response. One rate of FLOPs a second, megavlm's
own over all rows, makes them seconds.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavlm.parallel import platform

platform.install()  # before the first import of megatron-core

from megavlm.data.packs.trees import prompt_tree  # noqa: E402
from megavlm.families import family  # noqa: E402
from megavlm.models.common.tiny import TinySizes, tiny_config  # noqa: E402
from megavlm.models.cost import ModelCost  # noqa: E402
from tests.benchmarks.bench_model import (  # noqa: E402
    SIZES,
    TOKEN_IDS,
    VOCABULARY,
    Shape,
    inputs,
    measure,
)
from tests.benchmarks.results import RESULTS, replace_part  # noqa: E402
from tests.support.fork import launch  # noqa: E402

FAMILY, SIZE, LENGTH = "qwen2_5_vl", "tiny", 60
IMAGE = (1, 20, 20)  # patches, 100 tokens
PLOT = RESULTS.parents[2] / "docs" / "images" / "cost.svg"
OURS, THEIRS = "megavlm's tree", "separate sequences"


def shape(n: int, prompt: int, images: int) -> Shape:
    text = prompt - images * (math.prod(IMAGE) // 4)
    return Shape("", text, (n, LENGTH), (IMAGE,) * images)


# By what changes: its values, and the shape of each.
CURVES: dict[str, dict[int, Shape]] = {
    "responses of 60 tokens to a prompt of 400 with an image": {
        n: shape(n, 400, 1) for n in (1, 2, 4, 8, 16)
    },
    "tokens of a prompt of text, 8 responses of 60": {
        prompt: shape(8, prompt, 0) for prompt in (25, 100, 200, 400, 800)
    },
    "images of 100 tokens in a prompt with 40 tokens of text, 8 responses of 60": {
        count: shape(8, 40 + 100 * count, count) for count in (0, 1, 2, 4)
    },
}
Seconds = dict[str, float]  # by OURS and THEIRS


def modelled_flops(config: Any, of: Shape) -> Seconds:
    """Return the FLOPs of a group."""
    parts = family(config.model_type)
    cost = ModelCost.of(parts.mapping(config), parts.architecture(config))
    prompt, answers = inputs(config, of)
    images = {image.key: image for image in prompt.images}
    tower = sum(cost.image(image.grids) for image in images.values())
    output = 2.0 * VOCABULARY * config.text_config.hidden_size

    def flops(together: Sequence[list[int]]) -> float:
        language = cost.tree(prompt_tree(prompt, together), images) - tower
        return tower + 3 * (language + output * sum(map(len, together)))

    return {OURS: flops(answers), THEIRS: sum(flops([answer]) for answer in answers)}


def curves(repeats: int) -> tuple[dict[str, dict[int, Seconds]], dict[str, dict[int, Seconds]]]:
    """Return the measured and the modelled seconds."""
    config = tiny_config(FAMILY, TinySizes(**SIZES[SIZE]), VOCABULARY, TOKEN_IDS)
    rows = [(of, repeats) for points in CURVES.values() for of in points.values()]
    (results,) = launch(1, measure, SIZE, FAMILY, rows, timeout=3600)
    found = iter(results)
    measured = {
        name: {x: _named(next(found)[0]) for x in points} for name, points in CURVES.items()
    }
    work = {
        name: {x: modelled_flops(config, of) for x, of in points.items()}
        for name, points in CURVES.items()
    }
    rate = _sum(work, OURS) / _sum(measured, OURS)
    modelled = {
        name: {
            x: {who: flops / rate for who, flops in point.items()} for x, point in points.items()
        }
        for name, points in work.items()
    }
    return measured, modelled


def _named(seconds: Seconds) -> Seconds:
    return {OURS: seconds["tree"], THEIRS: seconds["transformers"]}


def _sum(curves: dict[str, dict[int, Seconds]], who: str) -> float:
    return sum(point[who] for points in curves.values() for point in points.values())


def table(
    measured: dict[str, dict[int, Seconds]], modelled: dict[str, dict[int, Seconds]]
) -> list[str]:
    lines = [
        f"| | | {OURS}: measured, modelled | {THEIRS}: measured, modelled | Faster: measured, "
        "modelled |",
        "|---|---|---|---|---|",
    ]
    for name, points in measured.items():
        for index, (x, is_) in enumerate(points.items()):
            should = modelled[name][x]
            cells = [f"{is_[who]:.2f} s, {should[who]:.2f} s" for who in (OURS, THEIRS)]
            faster = [f"{point[THEIRS] / point[OURS]:.1f} x" for point in (is_, should)]
            head = "" if index else name
            lines.append(f"| {head} | {x} | {' | '.join(cells)} | {', '.join(faster)} |")
    return lines


def plot(
    measured: dict[str, dict[int, Seconds]], modelled: dict[str, dict[int, Seconds]], path: Path
) -> None:
    """Draw a panel for each curve: points are measured, lines modelled."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (name, points) in zip(
        figure.subplots(1, len(measured)), measured.items(), strict=True
    ):
        for who, colour in ((OURS, "#1f5fbf"), (THEIRS, "#c2410c")):
            seconds = [point[who] for point in points.values()]
            lines = [point[who] for point in modelled[name].values()]
            axes.plot(list(points), seconds, "o", color=colour, label=f"{who}, measured")
            axes.plot(list(points), lines, "-", color=colour, linewidth=1, label="modelled")
        axes.set_xlabel(name.replace(", ", ",\n").replace(" in a", "\nin a"), fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(color="#e5e5e5")
    figure.axes[0].set_ylabel("processor seconds", fontsize=8)
    figure.axes[0].legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "megavlm"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    measured, modelled = curves(repeats)
    runs = "Each was run once" if repeats == 1 else f"Medians of {repeats} runs"
    text = "\n".join([f"{runs} after a first.", "", *table(measured, modelled)])
    print(text)
    replace_part("cost", text)
    plot(measured, modelled, PLOT)


if __name__ == "__main__":
    main()

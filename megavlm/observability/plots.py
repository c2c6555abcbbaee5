"""Reward curve of a run as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from megavlm.observability.metrics import EVALUATIONS_FILE, reward_points
from megavlm.observability.records import read_records

REWARD_FILE = "reward.png"


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to window - 1 values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def window_of(num_values: int) -> int:
    """Return how many steps to average over: a tenth of the run, but at least 3 and at most 50."""
    return min(50, max(3, num_values // 10))


def reward_curve(run_dir: Path | str) -> Path:
    """Draw reward per step, its moving mean and greedy test accuracy; return the PNG's path."""
    # matplotlib takes a second to load. At module level, each rank of a run would spend it at its
    # start.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    points = reward_points(run_dir)
    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    evaluations = read_records(run_dir / EVALUATIONS_FILE)
    # pyplot is not used, because it keeps global state and needs a display.
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if points:
        window = window_of(len(rewards))
        axes.plot(steps, rewards, color="#9db4d6", linewidth=1, label="reward per step")
        label = f"mean of {window} steps"
        axes.plot(steps, moving_mean(rewards, window), color="#1f5fbf", linewidth=2, label=label)
    if evaluations:
        shares = [record["greedy"]["overall"]["share"] for record in evaluations]
        errors = [
            [
                share - record["greedy"]["overall"]["interval"][0],
                record["greedy"]["overall"]["interval"][1] - share,
            ]
            for share, record in zip(shares, evaluations, strict=True)
        ]
        axes.errorbar(
            [record["step"] for record in evaluations],
            shares,
            yerr=list(zip(*errors, strict=True)),
            fmt="o",
            color="#c2410c",
            capsize=3,
            label="greedy test accuracy (95 % interval)",
            zorder=3,
        )
        for record, share in zip(evaluations, shares, strict=True):
            axes.annotate(
                f"{100 * share:.1f} %",
                (record["step"], share),
                xytext=(0, 10),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color="#c2410c",
            )
        if (blind := evaluations[-1]["blind"]) is not None:
            share = blind["overall"]["share"]
            axes.axhline(share, color="#666666", linewidth=1, linestyle=":", label="blind baseline")
    axes.set_xlabel("step")
    axes.set_ylabel("reward, accuracy")
    axes.margins(x=0.04, y=0.12)
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)
    if points or evaluations:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path = run_dir / REWARD_FILE
    figure.savefig(path)
    return path

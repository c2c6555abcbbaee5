"""What the processes of a run hold, sampled while it trains, and whether it grows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from megavlm.inference.server_main import shared_memory_of

# Largest growth over the second half of a run: a share of the mean, and an amount besides.
BOUNDS = {
    "memory_mb": (0.02, 20.0),
    "descriptors": (0.0, 4.0),
    "threads": (0.0, 2.0),
    "logs_mb": (0.0, 1.0),
    "shared_memory_files": (0.0, 4.0),
}


@dataclass(frozen=True)
class Sample:
    """Measures of a run after `step` steps, by the names of BOUNDS and the kind of process."""

    step: int
    values: dict[str, float]


def kind_of(process: psutil.Process) -> str:
    """Return the part that a process has in a run."""
    words = " ".join(process.cmdline())
    if "sglang" in words or "server_main.py" in words:
        return "server"
    rank = process.environ().get("RANK")
    if rank is not None and " train " in words:
        return f"rank {rank}"
    return "others"


def take_sample(run: int, run_dir: Path, step: int) -> Sample:
    """Return what process `run` and its descendants hold."""
    values: dict[str, float] = {}
    shared: set[str] = set()
    root = psutil.Process(run)
    for process in [root, *root.children(recursive=True)]:
        try:
            kind = kind_of(process)
            if kind == "server" and os.getpgid(process.pid) == process.pid:
                shared |= shared_memory_of(process.pid)
            with process.oneshot():
                held = {
                    "memory_mb": process.memory_full_info().uss / 2**20,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
        except psutil.Error:
            continue  # it has ended
        for name, value in held.items():
            values[f"{name} {kind}"] = values.get(f"{name} {kind}", 0.0) + value
    logs = [*run_dir.glob("*.log*"), *run_dir.glob("*.txt")]
    values["logs_mb all"] = sum(path.stat().st_size for path in logs) / 2**20
    values["shared_memory_files all"] = len(shared)
    return Sample(step, values)


def growth(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return how much a measure grows over the steps, by the line of least squares."""
    slope = np.polyfit(np.asarray(steps, float), np.asarray(values, float), 1)[0]
    return float(slope) * (steps[-1] - steps[0])


def table(samples: Sequence[Sample]) -> tuple[list[str], list[str]]:
    """Return the lines of a Markdown table of the second half, and the measures that grow."""
    half = [s for s in samples if s.step >= samples[-1].step / 2]
    names = sorted(set.intersection(*(set(sample.values) for sample in half)))
    lines = ["| Measure | First | Half | Last | Growth over the second half | Bound |"]
    lines.append("|---|---|---|---|---|---|")
    grown = []
    for name in names:
        values = [sample.values[name] for sample in half]
        found = growth([sample.step for sample in half], values)
        share, amount = BOUNDS[name.split()[0]]
        bound = share * float(np.mean(values)) + amount
        if found > bound:
            grown.append(name)
        first = samples[0].values.get(name, 0.0)
        lines.append(
            f"| {name} | {first:.1f} | {values[0]:.1f} | {values[-1]:.1f} | {found:+.1f} | "
            f"{bound:.1f} |"
        )
    return lines, grown

"""Seconds of the steps of a trainer in processes of its own, by the clock and of processors."""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from megavlm.observability.records import read_records

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FIRST = 2  # steps that are not counted: caches and pages fill
EVERY = 0.2  # seconds between readings of the processor time


@dataclass(frozen=True)
class Run:
    """Steps of a run that count. seconds: of each. processor: seconds of all of its processes in a
    step, on average. phases: mean seconds of each phase, of megavlm's alone.
    """

    seconds: list[float]
    processor: float
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class ProcessorTime:
    """Processor seconds of a process and all its descendants, read in a thread."""

    def __init__(self, pid: int) -> None:
        self._root, self._seconds = psutil.Process(pid), dict[int, float]()
        self._readings: list[tuple[float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    spent = process.cpu_times()
                    self._seconds[process.pid] = spent.user + spent.system
            except psutil.NoSuchProcess:
                if not self._root.is_running():
                    return
            self._readings.append((time.time(), sum(self._seconds.values())))
            time.sleep(EVERY)

    def between(self, start: float, end: float) -> float:
        """Return the processor seconds from one Unix time to another."""
        times, spent = zip(*self._readings, strict=True)
        first, last = (min(bisect(times, at), len(times) - 1) for at in (start, end))
        return float(spent[last] - spent[first])


def run(command: Sequence[str | Path], folder: Path, name: str) -> tuple[str, ProcessorTime]:
    """Run a trainer to its end. Returns its output. Raises RuntimeError with it if it fails."""
    path = folder / f"{name}.log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "HF_HUB_OFFLINE": "1"}
    with path.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            spent = ProcessorTime(process.pid)
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
    if code:
        raise RuntimeError(f"{command[0]} ended with {code}:\n{path.read_text()[-3000:]}")
    return path.read_text(), spent


def megavlm(folder: Path) -> Run:
    """Run megavlm on the files of a case."""
    command = [sys.executable, "-m", "megavlm", "train", str(folder / "ours.yaml")]
    _, spent = run(command, folder, "ours")
    steps = read_records(folder / "run" / "metrics.jsonl")
    counted = steps[FIRST:]
    names = [key for key in counted[0] if key.startswith("seconds/")]
    return Run(
        [step["seconds/total"] for step in counted],
        spent.between(steps[FIRST - 1]["time"], steps[-1]["time"]) / len(counted),
        {
            key.removeprefix("seconds/"): statistics.mean(step[key] for step in counted)
            for key in names
        },
    )


def trl(folder: Path, python: Path, processes: int) -> Run:
    """Run TRL on the files of a case. python: of its environment. processes: data-parallel ones."""
    program = str(HERE / "theirs.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [str(python), *(launcher if processes > 1 else []), program, str(folder)]
    output, spent = run(command, folder, "theirs")
    records = [json.loads(line) for line in output.splitlines() if line.startswith('{"time"')]
    times = [record["time"] for record in records]  # of the start, and of each step's end
    seconds = [end - start for start, end in pairwise(times)][FIRST:]
    return Run(seconds, spent.between(times[FIRST], times[-1]) / len(seconds))

"""A stage of the GPU kit: its parts, each a process with a limit of its own.

    python -m tests.gpu.stage a RESULTS

Every result is a JSON line, printed and appended to RESULTS/a.jsonl as soon as it is known. A part
that fails or takes too long is a line too, and the next part runs. Exit status 1 if something
failed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.gpu import shapes

SIDE_BY_SIDE = 4  # processes whose figures are not of time; their models fit on one GPU
TAIL = 1500  # characters of a part's output that explain its failure
CPU_FACTOR = 8  # of a part's limit: a CPU is slow, and may do other work


@dataclass(frozen=True)
class Part:
    """A module of this folder with its arguments. limit: seconds at most."""

    module: str
    arguments: tuple[str, ...] = ()
    limit: float = 60

    @property
    def name(self) -> str:
        return " ".join((self.module, *self.arguments))

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu.{self.module}", *self.arguments]


@dataclass(frozen=True)
class Stage:
    """Groups of parts, which run one after the other; the parts of a group run side by side.
    limit: seconds of the whole stage.
    """

    groups: tuple[tuple[Part, ...], ...]
    limit: float


def parity(*engine: str, limit: float = 80) -> tuple[Part, ...]:
    levels = ("tiny",) if shapes.is_tiny() else ("tiny", "wide")
    return tuple(
        Part("parity", (family, level, *engine), limit)
        for level in levels
        for family in shapes.FAMILIES
    )


MACHINE = (Part("machine", limit=45),)
FIGURES = tuple((Part("figures", (name,), limit=75),) for name in ("3b", "7b"))
STAGES: Mapping[str, Stage] = {
    "a": Stage(
        (
            MACHINE,
            (Part("updates"), Part("linear_attention"), *parity()),
            *FIGURES,
            (Part("profile"),),
        ),
        limit=355,
    ),
    "b": Stage((MACHINE, (Part("serving", limit=420),)), limit=480),
    "c": Stage(((Part("grpo", limit=400),), (Part("grpo", ("fp8",), limit=170),)), limit=480),
    "d": Stage((MACHINE, (Part("updates"), *parity("engine")), *FIGURES), limit=355),
}


@dataclass
class Results:
    """The results of a stage: printed, and appended to a file."""

    stage: str
    file: TextIO
    faults: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, part: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"stage": self.stage, "part": part, **values})
        with self._lock:
            self.faults += values.get("fault") is not None
            print(line, flush=True)
            self.file.write(line + "\n")
            self.file.flush()


def run(stage: Stage, results: Results) -> None:
    """Run all parts of a stage."""
    factor = CPU_FACTOR if shapes.is_tiny() else 1
    deadline = time.monotonic() + factor * stage.limit
    for group in stage.groups:
        with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
            for done in [pool.submit(run_part, part, results, deadline, factor) for part in group]:
                done.result()


def run_part(part: Part, results: Results, deadline: float, factor: float = 1) -> None:
    """Run a part within its limit and the stage's deadline, and add its results."""
    start = time.monotonic()
    limit = min(factor * part.limit, deadline - start)
    if limit <= 0:
        results.add(part.name, {"check": "end", "fault": "not run: the stage's time was over"})
        return
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            part.command(), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        killer = threading.Timer(limit, _kill, [process])
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                results.add(part.name, json.loads(line))
        status = process.wait()
        killer.cancel()
        _kill(process)  # what it may have left: servers
        seconds = time.monotonic() - start
        fault = None
        if status:
            reason = f"stopped after {limit:.0f} s" if seconds >= limit else f"exit status {status}"
            fault = f"{reason}: {_tail(errors)}"
        results.add(part.name, {"check": "end", "fault": fault, "seconds": round(seconds, 1)})


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a part's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _tail(file: TextIO) -> str:
    file.seek(0)
    return file.read()[-TAIL:]


def main(arguments: Sequence[str]) -> int:
    name, folder = arguments
    if name not in STAGES:
        raise SystemExit(f"stage {name!r} is unknown; use one of {', '.join(STAGES)}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        results = Results(name, file)
        start = time.monotonic()
        date, command = time.strftime("%Y-%m-%d", time.gmtime()), f"bash gpu/run.sh {name}"
        results.add("stage", {"check": "start", "fault": None, "date": date, "command": command})
        run(STAGES[name], results)
        seconds = round(time.monotonic() - start, 1)
        results.add("stage", {"check": "end", "fault": None, "seconds": seconds})
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

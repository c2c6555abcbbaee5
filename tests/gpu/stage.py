"""A stage of the GPU kit: its parts, each a process with a limit of its own.

    python -m tests.gpu.stage a RESULTS

Every result is a JSON line, printed and appended to RESULTS/a.jsonl as soon as it is known. A part
that fails or takes too long is a line too, and the next part runs. What parts and their servers say
besides is in RESULTS/a.log. Exit status 1 if something failed.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.gpu import shapes

# Processes whose figures are not of time: kernels are compiled on one core each.
SIDE_BY_SIDE = min(6, 2 * (os.cpu_count() or 1))
TAIL = 1500  # characters of a part's output that explain its failure
LOG = 500_000  # characters of a part's output that come back; a file of at most 16 MiB does
GRACE = 15  # seconds in which a part that is stopped shows the logs of its servers
CPU_FACTOR = 8  # of a part's limit: a CPU is slow, and may do other work
# GPU memory of the parts that run side by side, in GB. On an H200 with 150, three wide dense models
# or two wide mixtures fit, and four wide models do not; each takes 25 to 47 at its peak.
TINY, FEW_LAYERS, WIDE, WIDE_MIXTURE = 8.0, 30.0, 40.0, 70.0


@dataclass(frozen=True)
class Part:
    """A module of this folder with its arguments. limit: Seconds at most. gigabytes: GPU memory
    that it takes, for parts that run side by side.
    """

    module: str
    arguments: tuple[str, ...] = ()
    limit: float = 60
    gigabytes: float = 0.0

    @property
    def name(self) -> str:
        return " ".join((self.module, *self.arguments))

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu.{self.module}", *self.arguments]


@dataclass(frozen=True)
class Stage:
    """Groups of parts, which run one after the other; the parts of a group run side by side, as far
    as the GPU has memory. limit: Seconds of the whole stage.
    """

    groups: tuple[tuple[Part, ...], ...]
    limit: float


def parity(level: str, *engine: str) -> tuple[Part, ...]:
    """Return the parts of all families. Kernels of linear attention are compiled by Triton."""
    parts = []
    for family in shapes.FAMILIES:
        limit = 200 if family.startswith("qwen3_5") else 120
        wide = WIDE_MIXTURE if family.endswith("_moe") else WIDE
        gigabytes = wide if level == "wide" else TINY
        parts.append(Part("parity", (family, level, *engine), limit, gigabytes))
    return tuple(parts)


# What the parts of an H200's first run took: updates 66 s, figures 76 and 36, parity 25 to over
# 150, a server's start 82.
MACHINE = (Part("machine", limit=60),)
UPDATES = Part("updates", limit=130, gigabytes=FEW_LAYERS)
FIGURES = ((Part("figures", ("3b",), limit=130),), (Part("figures", ("7b",), limit=90),))
PROFILE = (Part("profile", limit=90),)


# Seconds of the parts of stage c. The first five steps give a result before the rest begins.
GRPO_LIMITS = {"first": 170.0, "rest": 330.0, "fp8": 170.0}
LONG_LIMIT = 510.0  # of stage e's


def stages() -> dict[str, Stage]:
    """Return all stages. A CPU runs none of what needs released widths or CUDA IPC."""
    is_tiny = shapes.is_tiny()
    linear = Part("linear_attention", limit=150, gigabytes=TINY)
    others = () if is_tiny else ((Part("serving", ("cuda_ipc",), limit=150),),)

    def wide(*engine: str) -> tuple[tuple[Part, ...], ...]:
        return () if is_tiny else (parity("wide", *engine),)

    return {
        "a": Stage(
            (MACHINE, (UPDATES, linear, *parity("tiny")), *FIGURES, PROFILE, *wide()), limit=570
        ),
        "b": Stage((MACHINE, (Part("serving", limit=330),), *others), limit=570),
        "c": Stage(
            tuple((Part("grpo", (name,), limit),) for name, limit in GRPO_LIMITS.items()), limit=570
        ),
        "d": Stage(
            (
                MACHINE,
                (UPDATES, *parity("tiny", "engine")),
                *FIGURES,
                PROFILE,
                *wide("engine"),
            ),
            limit=570,
        ),
        "e": Stage((MACHINE, (Part("grpo", ("long",), LONG_LIMIT),)), limit=570),
    }


class Room:
    """The GPU's free memory, which parts that run side by side take and give back."""

    def __init__(self, gigabytes: float) -> None:
        self._free = self._all = gigabytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, gigabytes: float) -> Iterator[None]:
        """Wait until so much is free, and keep it within the context. A part that needs more than
        there is gets all of it.
        """
        gigabytes = min(gigabytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gigabytes)
            self._free -= gigabytes
        try:
            yield
        finally:
            with self._changed:
                self._free += gigabytes
                self._changed.notify_all()


def free_gigabytes() -> float:
    """Return the free memory of the first GPU, by nvidia-smi; without one, there is no limit."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(query, capture_output=True, text=True)
    except FileNotFoundError:
        return math.inf
    return int(reply.stdout.splitlines()[0]) * 2**20 / 1e9 if reply.stdout else math.inf


@dataclass
class Results:
    """The results of a stage: printed, and appended to a file. log: File of what parts say
    besides.
    """

    stage: str
    file: TextIO
    log: TextIO
    faults: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, part: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"stage": self.stage, "part": part, **values})
        with self._lock:
            self.faults += values.get("fault") is not None
            print(line, flush=True)
            self.file.write(line + "\n")
            self.file.flush()

    def add_log(self, part: str, text: str) -> None:
        with self._lock:
            self.log.write(f"===== {part}\n{text[-LOG:]}\n")
            self.log.flush()


def run(stage: Stage, results: Results, room: Room) -> None:
    """Run all parts of a stage."""
    factor = CPU_FACTOR if shapes.is_tiny() else 1
    deadline = time.monotonic() + factor * stage.limit

    def run_in_room(part: Part) -> None:
        with room.taken(part.gigabytes):
            run_part(part, results, deadline, factor)

    for group in stage.groups:
        with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
            for done in [pool.submit(run_in_room, part) for part in group]:
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
        stopper = threading.Timer(limit, _stop, [process])
        stopper.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and line.endswith("}\n"):  # a part may be stopped within one
                results.add(part.name, json.loads(line))
        status = process.wait()
        stopper.cancel()
        _kill(process)  # what it may have left: servers
        seconds = time.monotonic() - start
        errors.seek(0)
        text = errors.read()
        fault = None
        if status:
            reason = f"stopped after {limit:.0f} s" if seconds >= limit else f"exit status {status}"
            fault = f"{reason}: {text[-TAIL:]}"
        results.add(part.name, {"check": "end", "fault": fault, "seconds": round(seconds, 1)})
        results.add_log(part.name, text)


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a part, so that it shows the logs of its servers, and kill what is left of it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a part's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str]) -> int:
    name, folder = arguments
    known = stages()
    if name not in known:
        raise SystemExit(f"stage {name!r} is unknown; use one of {', '.join(known)}")
    results_folder = Path(folder)
    results_folder.mkdir(parents=True, exist_ok=True)
    with (
        (results_folder / f"{name}.jsonl").open("a", encoding="utf-8") as file,
        (results_folder / f"{name}.log").open("a", encoding="utf-8") as log,
    ):
        results = Results(name, file, log)
        start = time.monotonic()
        begun = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
        begun |= {"command": f"bash gpu/run.sh {name}", "state": os.environ.get("STATE", "")}
        results.add("stage", {"check": "start", "fault": None, **begun})
        run(known[name], results, Room(free_gigabytes()))
        seconds = round(time.monotonic() - start, 1)
        results.add("stage", {"check": "end", "fault": None, "seconds": seconds})
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

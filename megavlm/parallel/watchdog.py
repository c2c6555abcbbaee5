"""Watchdog of a run: a thread on each rank that ends the run when no rank makes progress any more.

A rank makes progress when a phase of a step begins or ends, when a microbatch or a response is
done, and when a rollout server works (observability/phases.py counts all of these). The ranks add
their signs of progress to one counter in torchrun's store. When the counter has not changed for
`run.watchdog` seconds, each rank writes the stacks of its threads and reports to the others whether
it waits for them, so that the error can name the rank that is behind: the one that does not wait.

The thread also runs while the main thread waits in a C function. If such a function holds the
interpreter's lock, faulthandler's timer, which is written in C, writes the stacks of that rank.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, Self, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d

from megavlm.observability.phases import Phases
from megavlm.observability.text import duration
from megavlm.process import STACKS_WANTED

TICK = 5.0  # longest pause between two checks, in seconds
GRACE = 10.0  # seconds that each rank has to report its state
STDERR = 2
SERVERS_GROUP = "servers"  # description of process groups of a rank and rollout servers
# Modules whose functions wait for messages between two ranks. gloo does not record messages.
MESSAGES = (
    "torch.distributed.",
    "megatron.core.pipeline_parallel.",
    "megavlm.parallel.collectives",
)

T = TypeVar("T")


class WatchedServers(Protocol):
    """The rollout servers, as seen by the driver's watchdog."""

    @property
    def work_seen(self) -> int:
        """Number of times that a server was seen working."""

    def write_stacks(self) -> None:
        """Make the servers write the stacks of their threads to their logs."""


@dataclass(frozen=True)
class RankReport:
    """State of a rank in a run that hangs.

    phase: Current phase of its step.
    seconds: Seconds since its last sign of progress.
    waits: Whether it waits for other ranks in a collective or for a message.
    place: Function, file and line that its main thread is in.
    """

    phase: str
    seconds: float
    waits: bool
    place: str


class Watchdog:
    """Context manager that calls `end` with a message if no rank makes progress for `seconds`. With
    0 seconds it does nothing.

    folder: Each rank writes a file with its stacks there.
    store: The ranks' shared store, by a connection that only the watchdog uses.
    servers: The rollout servers, an attribute that the driver sets.
    """

    def __init__(
        self,
        seconds: float,
        phases: Phases,
        folder: Path,
        end: Callable[[str], object],
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
    ) -> None:
        self._seconds, self._phases, self._folder, self._end = seconds, phases, folder, end
        self._store, self._rank, self._world_size = store, rank, world_size
        self.servers: WatchedServers | None = None
        self._main = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # Requests to the store run in a thread: if its machine is lost, they never return.
        self._asking = ThreadPoolExecutor(1, "watchdog-store")
        self._own = -1, time.monotonic()  # signs of progress of this rank, time of the last one
        self._sent = 0

    def __enter__(self) -> Self:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._seconds:
            self._thread.join()
        self._asking.shutdown(wait=False)

    def _watch(self) -> None:
        tick = min(TICK, self._seconds / 5)
        still, total, last = 0.0, 0, time.monotonic()
        while not self._closing.wait(tick):
            now = time.monotonic()
            # Count at most two ticks at a time, so that suspending the whole job does not count.
            still, last = still + min(now - last, 2 * tick), now
            before, total = total, self._ask(self._exchange, tick) or total
            own = self._signs()
            if own != self._own[0]:
                self._own = own, now
            if self._own[1] == now or total > before:
                still = 0.0
            if total < 0 or still >= self._seconds:
                faulthandler.cancel_dump_traceback_later()
                self._fire()
                return
            faulthandler.dump_traceback_later(self._seconds - still + 2 * tick, file=STDERR)
        faulthandler.cancel_dump_traceback_later()

    def _signs(self) -> int:
        return self._phases.beats + (0 if self.servers is None else self.servers.work_seen)

    def _exchange(self) -> int:
        """Add this rank's new signs of progress to the shared counter. Returns the counter, or -1
        if another rank's watchdog has found that no rank makes progress.
        """
        if self._store.check([_key("end")]):
            return -1
        new, self._sent = self._signs() - self._sent, self._signs()
        return int(self._store.add(_key("signs"), new))

    def _fire(self) -> None:
        if self.servers is not None:
            self.servers.write_stacks()
            self._in_time(self._want_stacks, GRACE)
        stacks = _stacks()
        print(f"megavlm: stacks of rank {self._rank}:\n{stacks}", file=sys.stderr, flush=True)
        self._in_time(lambda: self._keep(stacks), GRACE)
        report = RankReport(
            self._phases.current,
            time.monotonic() - self._own[1],
            waits_for_others(self._main),
            _place(sys._current_frames()[self._main]),
        )
        reports = {self._rank: report, **(self._ask(lambda: self._tell(report), 2 * GRACE) or {})}
        self._end(
            f"no progress for {duration(self._seconds)} (run.watchdog): "
            f"{behind(reports, self._world_size)}; the stacks are in {self._folder}; the run can "
            "resume from its last checkpoint"
        )

    def _tell(self, report: RankReport) -> dict[int, RankReport]:
        """Send this rank's report, and return the reports that ranks send within GRACE seconds."""
        self._store.set(_key("end"), "")
        self._store.set(_key(self._rank), json.dumps(asdict(report)))
        keys = {rank: _key(rank) for rank in range(self._world_size)}
        deadline = time.monotonic() + GRACE
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {
            rank: RankReport(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _keep(self, stacks: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"rank_{self._rank}.txt").write_text(stacks)

    def _want_stacks(self) -> None:
        """Request the stacks of servers on other nodes, if processes there await the request."""
        wanted = self._folder / STACKS_WANTED
        if wanted.exists():
            wanted.write_text("yes")

    def _ask(self, question: Callable[[], T], seconds: float) -> T | None:
        """Return the answer of the store, or None if there is none in time."""
        try:
            return self._asking.submit(question).result(seconds)
        except (NoAnswer, RuntimeError):  # torch's stores raise RuntimeError for a lost connection
            return None

    def _in_time(self, work: Callable[[], None], seconds: float) -> None:
        """Do `work` in a thread, and wait for it at most `seconds`: a file system may hang."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)


def behind(reports: Mapping[int, RankReport], world_size: int) -> str:
    """Describe the rank that the others wait for, as part of a sentence."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        return f"rank {silent[0]}{more} gave no answer: stopped, or its machine is lost"
    busy = [rank for rank, report in reports.items() if not report.waits]
    rank = max(busy or reports, key=lambda rank: reports[rank].seconds)
    report = reports[rank]
    where = f"in phase {report.phase} for {duration(report.seconds)}, at {report.place}"
    if busy:
        return f"rank {rank} is behind, {where}"
    return f"all ranks wait for each other; rank {rank} has waited longest, {where}"


def waits_for_others(main: int) -> bool:
    """Return True if this rank is in a collective with other ranks, in any of its threads, or if
    the thread `main` sends them a message or receives one.
    """
    innermost: str = sys._current_frames()[main].f_globals.get("__name__", "")
    return _is_in_collective() or innermost.startswith(MESSAGES)


def _is_in_collective() -> bool:
    """Return True if a flight recorder of torch has a collective of ranks that has not ended. Gloo
    has a recorder, and NCCL has one where torch was built with it.

    Only the last entry of a group counts: NCCL never marks the parts of a coalesced operation as
    ended, and the operation itself comes after them.
    """
    last = {}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(_distributed_c10d, recorder):
            trace = json.loads(getattr(_distributed_c10d, recorder)())
            for entry in trace.get("entries", ()):
                last[recorder, entry["pg_id"]] = entry
    return any(
        not entry["retired"] and entry["process_group"][1] != SERVERS_GROUP
        for entry in last.values()
    )


def _key(name: object) -> str:
    return f"megavlm/watchdog/{name}"


def _stacks() -> str:
    """Return the stacks of all threads."""
    descriptor = os.memfd_create("stacks")  # in memory, since a file system may be what hangs
    with open(descriptor, "rb+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def _place(frame: FrameType) -> str:
    """Return the innermost place in megavlm's code, or the innermost place if there is none."""
    callers: list[FrameType] = []
    caller: FrameType | None = frame
    while caller is not None:
        callers.append(caller)
        caller = caller.f_back
    own = (one for one in callers if "megavlm" in one.f_globals.get("__name__", ""))
    found = next(own, frame)
    return f"{found.f_code.co_name} ({found.f_code.co_filename}:{found.f_lineno})"

"""Guards of a run: skipped updates with non-finite gradients, stop requests, and the time limit."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from megavlm.parallel.collectives import any_rank
from megavlm.process import STOP_SIGNALS, NotFiniteError, Stopped

MAX_SKIPPED = 5
SLURM_END = "SLURM_JOB_END_TIME"  # Unix seconds, in the environment of a job
MARGIN = 60.0  # seconds, added to twice the longest step with its evaluation and checkpoint


class SkipCounter:
    """Number of updates in a row that were skipped because a gradient was not finite."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def record(self, skipped: bool, step: int) -> None:
        """Count an update. Raises NotFiniteError after more than MAX_SKIPPED in a row."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row > MAX_SKIPPED:
            raise NotFiniteError(
                f"step {step}: the gradient was not finite {self.in_a_row} updates in a row; "
                "lower optimizer.lr, or look at the rows in skipped_updates.jsonl of the run."
            )


class TimeLimit:
    """Time by which a run must have stopped: `hours` after its start or, if `hours` is None, when
    Slurm ends the job.
    """

    def __init__(self, hours: float | None, started: float) -> None:
        """Set the limit. started: Unix seconds."""
        slurm_end = float(os.environ.get(SLURM_END, "inf"))
        self.end = slurm_end if hours is None else started + hours * 3600
        self._last, self._longest = time.time(), 0.0

    def is_near(self) -> bool:
        """Return True if another step may end too late. Call it once a step."""
        now = time.time()
        self._longest, self._last = max(self._longest, now - self._last), now
        return now + 2 * self._longest + MARGIN > self.end


class StopRequest:
    """Context manager that turns stop signals and the time limit into stop requests. It works in
    the main thread only, as signal handlers do.
    """

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self._requested = self._interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._interrupts:
            raise Stopped

    def complete(self, work: Callable[[], None]) -> bool:
        """Run `work`, which a stop signal interrupts. Returns False if it was interrupted."""
        self._interrupts = True
        try:
            if not self._requested:
                work()
                return True
        except Stopped:
            pass
        finally:
            self._interrupts = False
        return False

    def agreed(self) -> bool:
        """Return True on every rank if any rank was asked to stop or is near the time limit.
        Collective.
        """
        return any_rank(self._requested or self._limit.is_near())

"""What stops or skips an update: numbers that are not finite, and a request to stop."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from megavlm.parallel.collectives import any_rank

MAX_SKIPPED = 5


class SkipCounter:
    """Counts updates in a row that were skipped for a gradient that is not finite."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def record(self, skipped: bool, step: int) -> None:
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row > MAX_SKIPPED:
            raise RuntimeError(
                f"step {step}: the gradient was not finite {self.in_a_row} updates in a row; "
                "lower optimizer.lr, or look at the last samples of the run."
            )


class StopRequest:
    """SIGUSR1 (Slurm's warning before the time limit) or SIGTERM (a preemption) on any rank: all
    ranks finish the step, save and stop. Within the context; main thread only, as any handler.
    """

    def __init__(self) -> None:
        self._requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def agreed(self) -> bool:
        """Collective: one answer for all ranks."""
        return any_rank(self._requested)

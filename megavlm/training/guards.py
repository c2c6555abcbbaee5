"""Guards of a run: updates skipped for gradients that are not finite, and requests to stop."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from megavlm.parallel.collectives import any_rank

MAX_SKIPPED = 5


class SkipCounter:
    """Number of updates in a row that were skipped because a gradient was not finite."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def record(self, skipped: bool, step: int) -> None:
        """Count an update. Raises RuntimeError after more than MAX_SKIPPED in a row."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row > MAX_SKIPPED:
            raise RuntimeError(
                f"step {step}: the gradient was not finite {self.in_a_row} updates in a row; "
                "lower optimizer.lr, or look at the last samples of the run."
            )


class StopRequest:
    """Requests to stop by SIGUSR1 (Slurm's warning before the time limit) or SIGTERM (preemption),
    within the context. Main thread only, as for any signal handler.
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
        """Return True on every rank if any rank was asked to stop. Collective."""
        return any_rank(self._requested)

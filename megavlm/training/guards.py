"""What stops or skips an update: numbers that are not finite, and a request to stop."""

import signal
from types import FrameType

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
    """SIGUSR1 (Slurm's warning before the time limit) on any rank: all ranks finish the step, save
    and stop.
    """

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def agreed(self) -> bool:
        """Collective: one answer for all ranks."""
        return any_rank(self._requested)

"""Progress of a long wait: a live line on a terminal, a line now and then in a log."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich import progress
from rich.console import Console

LOG_EVERY = 10.0  # seconds


class Progress:
    """Context in which `show` replaces a line on a terminal. A log gets a line every LOG_EVERY
    seconds, and none of a wait that is shorter.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._clock = clock
        self._last = clock()
        self._live: progress.Progress | None = None
        if self._console.is_terminal:
            self._live = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}", markup=False),
                progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=None, visible=False)

    def show(self, line: str) -> None:
        """Show how far the wait is."""
        if self._live is not None:
            self._live.update(self._task, description=line, visible=True)
        elif self._clock() - self._last >= LOG_EVERY:
            self._last = self._clock()
            self._console.print(line, markup=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

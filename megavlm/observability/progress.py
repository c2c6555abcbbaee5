"""How far a long wait is: one line written over on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

LOG_EVERY, TERMINAL_EVERY = 10.0, 0.2  # seconds


class Progress:
    """A context; `show` is called as often as there is something to tell."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._last = clock()  # what is over within the first interval is told by nobody
        self._width = 0

    def show(self, line: str) -> None:
        now = self._clock()
        if now - self._last < (TERMINAL_EVERY if self._is_terminal else LOG_EVERY):
            return
        self._last = now
        if self._is_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A terminal is left with an empty line."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

"""Progress of a command: one live line on a terminal, sparse lines in a log."""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from megavlm.observability.text import duration, minutes

# A log gets the next line of progress after this many seconds, or after this share of the time
# that has passed, whichever is longer.
LOG_EVERY, LOG_SHARE = 30.0, 0.05


T = TypeVar("T")
logger = logging.getLogger(__name__)


class Output(Console):
    """Console that raises BrokenPipeError if nobody reads it; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Progress:
    """Context in which the last line of a terminal shows the current activity, its duration and the
    time left. A log gets one line for each `begin`, and now and then one for everything else.

    Print permanent lines with `line`. Several threads may use it. failures: number of failed
    attempts (see `attempt`) so far.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        started: float | None = None,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare the line. started: Unix seconds, by default now. is_quiet: shows nothing."""
        self._console = Output(file=stream, highlight=False, soft_wrap=True, quiet=is_quiet)
        self.failures = 0
        self._told: set[str] = set()
        self._clock = clock
        self._started = clock() if started is None else started
        self._last_log = clock()
        self._doing = self._detail = self._logged = ""
        self._first: tuple[int, float] | None = None  # steps done and time when counting began
        self._seconds_left: float | None = None
        self._live: Live | None = None
        if self._console.is_terminal and not is_quiet:
            self._spinner = Spinner("dots")
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=4,
                get_renderable=self._rendered,
            )

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def begin(self, what: str) -> None:
        """Show that the activity `what` begins."""
        self._doing, self._detail, self._seconds_left = what, "", None
        self._log(what)

    def count(self, done: int, total: int, unit: str = "step") -> None:
        """Show that `done` of `total` steps are done and the next one begins. The time left is
        estimated from the steps since the first call.
        """
        now = self._clock()
        if self._first is None or done < self._first[0]:
            self._first = done, now
        first, since = self._first
        if done > first:
            self._seconds_left = (now - since) / (done - first) * (total - done)
        self._doing = f"{unit} {min(done + 1, total):,} of {total:,}"
        self.show("")

    def show(self, detail: str) -> None:
        """Show a detail of the current activity."""
        self._detail = detail
        if self._live is None:
            due = max(LOG_EVERY, LOG_SHARE * self.elapsed)
            text = self._text
            if self._clock() - self._last_log >= due and text != self._logged:
                self._log(text)

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self.attempt("the output", lambda: self._console.print(text, markup=False))

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Call `work`, which writes a record of the run. Returns its result, or None if it fails.

        A full disk or a closed output does not end training: the failure is logged once for each
        `what`, and counted.
        """
        try:
            return work()
        except OSError as error:
            self.failures += 1
            if what not in self._told:
                self._told.add(what)
                logger.warning("%s cannot be written (%s); the run goes on without it", what, error)
            if error.errno == errno.EPIPE:  # else the rest of the buffer fails again at the end
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self._console.file.fileno())
            return None

    def _log(self, text: str) -> None:
        if self._live is None:
            self._last_log, self._logged = self._clock(), text
            left = (
                "" if self._seconds_left is None else f", about {duration(self._seconds_left)} left"
            )
            self.line(f"[{minutes(self.elapsed)}] {text}{left}")

    @property
    def _text(self) -> str:
        return ": ".join(part for part in (self._doing, self._detail) if part)

    def _rendered(self) -> Spinner:
        left = "" if self._seconds_left is None else f", about {minutes(self._seconds_left)} left"
        text = Text(f"{self._text}  ", no_wrap=True, overflow="ellipsis")
        self._spinner.update(text=text.append(f"{minutes(self.elapsed)} so far{left}", "dim"))
        return self._spinner

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            # A forked child does not use the live line: at the fork, another thread may have held
            # its lock.
            os.register_at_fork(after_in_child=_restore_output)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _restore_output() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

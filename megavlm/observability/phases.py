"""Wall-clock seconds per phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Adds up the time spent in named phases; a phase may run several times."""

    def __init__(
        self,
        synchronize: Callable[[], object] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """synchronize: called at both ends of a phase, to wait for work queued on a device."""
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock or time.perf_counter
        self._seconds: dict[str, float] = {}
        self._start = self._clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._synchronize()
        start = self._clock()
        yield
        self._synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def begin(self) -> None:
        """Starts the clock of seconds/total; without it that runs from the last `take`."""
        self._start = self._clock()

    def take(self) -> dict[str, float]:
        """The metrics seconds/<phase> and seconds/total since the last call, and starts anew."""
        now = self._clock()
        metrics = {f"seconds/{name}": value for name, value in self._seconds.items()}
        metrics["seconds/total"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics

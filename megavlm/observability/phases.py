"""Wall-clock seconds per phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Timer of named phases; a phase may run several times."""

    def __init__(
        self,
        synchronize: Callable[[], object] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start the clock. synchronize: waits for queued device work at both ends of a phase."""
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
        """Start the clock of seconds/total, which otherwise runs from the last `take`."""
        self._start = self._clock()

    def take(self) -> dict[str, float]:
        """Return seconds/<phase> and seconds/total since the last call, and reset them."""
        now = self._clock()
        metrics = {f"seconds/{name}": value for name, value in self._seconds.items()}
        metrics["seconds/total"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics

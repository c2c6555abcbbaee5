"""Wall-clock seconds per phase of a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Phases:
    """Timer of named phases; a phase may run several times.

    current: the phase that runs. beats: number of signs of progress so far. The watchdog of a run
    (parallel/watchdog.py) reads it to see that this process makes progress.
    """

    def __init__(
        self,
        synchronize: Callable[[], object] | None = None,
        clock: Callable[[], float] | None = None,
        begun: Callable[[str], object] | None = None,
        before: Mapping[str, float] | None = None,
        annotate: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Start the clock.

        synchronize: Function that waits for queued device work, at both ends of a phase. begun:
        Function that gets the name of each phase that begins. before: Seconds of phases that ended
        earlier. annotate: Function that returns a context, which shows a phase in a profile.
        """
        self._synchronize = synchronize or (lambda: None)
        self._begun = begun or (lambda name: None)
        self._annotate, self._clock = annotate, clock or time.perf_counter
        self._seconds = dict(before or {})
        self._start = self._clock() - sum(self._seconds.values())
        self.current, self.beats = "start", 0

    def beat(self) -> None:
        """Count a sign of progress within a phase: a microbatch, a response, a part of a file."""
        self.beats += 1

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begun(name.replace("_", " "))
        outer, self.current = self.current, name
        self.beat()
        self._synchronize()
        start = self._clock()
        with self._annotate(name):
            yield
            self._synchronize()
        self.current = outer
        self.beat()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def begin(self) -> None:
        """Start the clock of seconds/total here, and not at the last `take`."""
        self._start = self._clock()

    def take(self) -> dict[str, float]:
        """Return seconds/<phase> and seconds/total since the last call, and reset them."""
        now = self._clock()
        metrics = {f"seconds/{name}": value for name, value in self._seconds.items()}
        metrics["seconds/total"] = now - self._start
        self._seconds, self._start = {}, now
        return metrics


def seconds_outside_phases(metrics: Mapping[str, float | None]) -> float:
    """Return the seconds of `seconds/total` that belong to no phase."""
    phases = sum(value or 0.0 for name, value in metrics.items() if name.startswith("seconds/")) - (
        metrics["seconds/total"] or 0.0
    )
    return max(0.0, (metrics["seconds/total"] or 0.0) - phases)


def phase_shares(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return phases in words with their seconds and shares of the sum, the longest phase first."""
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [(phase.replace("_", " "), value, value / total) for phase, value in ordered if total]

"""Experiment trackers beside TensorBoard. Each works in a thread of its own, so that a slow network
delays no step, and none of them can end a run.
"""

import importlib.util
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megavlm.observability.records import write_whole
from megavlm.observability.text import shorten
from megavlm.observability.tracker_packages import TRACKERS, TrackedImage, TrackedRun, Tracker

IDS_FILE = "trackers.json"  # in the run directory: the run's id in each tracker, for a resume
WAITING = 1000  # records that wait for a tracker's network; further ones are dropped and counted
CLOSE_SECONDS = 60.0  # that the end of a run waits for each tracker
CAPTION = 500  # characters
IMAGES = 2  # of a group

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"run.trackers={list(names)} needs the package {name}, which is not installed: "
                f"pip install 'megavlm[{name}]', or remove it"
            )


class Trackers:
    """The trackers of a run; used by one process, the driver. None of them can end the run."""

    def __init__(
        self, names: Sequence[str], folder: Path | str, config: Mapping[str, Any], start_step: int
    ) -> None:
        """Begin the runs; those of `folder` go on if start_step is above 0."""
        self._folder, self._lock = Path(folder), threading.Lock()
        path = self._folder / IDS_FILE
        self._ids = json.loads(path.read_text()) if start_step and path.exists() else {}
        run = TrackedRun(self._folder.resolve().name, self._folder, config)
        self._threads = [
            TrackerThread(name, replace(run, id=self._ids.get(name)), self._begun) for name in names
        ]

    def _begun(self, name: str, run_id: str) -> None:
        with self._lock:
            self._ids[name] = run_id
            write_whole(self._folder / IDS_FILE, json.dumps(self._ids).encode())

    @property
    def failures(self) -> int:
        """Number of records that did not reach a tracker so far."""
        return sum(thread.failures for thread in self._threads)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite ones of a step's values."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for thread in self._threads:
            thread.send(lambda tracker: tracker.scalars(step, finite))

    def samples(self, step: int, groups: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Send images of sampled groups, as SampleWriter wrote them to `folder`."""
        images = [
            TrackedImage(folder / name, _caption(group))
            for group in groups
            for name in group["images"][:IMAGES]
        ]
        for thread in self._threads if images else ():
            thread.send(lambda tracker: tracker.images(step, images))

    def close(self) -> None:
        """End the runs. What the network has not taken in CLOSE_SECONDS is left out."""
        for thread in self._threads:
            thread.close()


def _caption(group: Mapping[str, Any]) -> str:
    first = group["responses"][0]
    end = f"reward {first['reward']:.3g}, answer {group['answer']}"
    return shorten(f"{group['prompt']}\n\n{first['text']}\n\n{end}", CAPTION)


class TrackerThread:
    """Thread that makes a tracker's run and sends it records, one after another."""

    def __init__(self, name: str, run: TrackedRun, begun: Callable[[str, str], None]) -> None:
        """Start the thread. begun: called with the name and the id of a run that has begun."""
        self._name, self._run, self._begun = name, run, begun
        self.failures = 0
        self._work: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._loop, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[Tracker], None]) -> None:
        """Have the thread do `work`, or count a failure if too much waits."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._failed("it takes records more slowly than they come")

    def close(self) -> None:
        with suppress(queue.Full):
            self._work.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    def _loop(self) -> None:
        tracker = self._start()
        while (work := self._work.get()) is not None:
            tracker = tracker or self._start()  # its network may be back
            if tracker is not None:
                self._attempt(work, tracker)
            self._work.task_done()
        if tracker is not None:
            self._attempt(lambda tracker: tracker.close(), tracker)

    def _start(self) -> Tracker | None:
        try:
            tracker = TRACKERS[self._name](self._run)
            self._begun(self._name, tracker.id)
        # Another package over a network: it may raise anything, and is not worth the run.
        except Exception as error:
            self._failed(repr(error))
            return None
        return tracker

    def _attempt(self, work: Callable[[Tracker], None], tracker: Tracker) -> None:
        try:
            work(tracker)
        except Exception as error:  # as above
            self._failed(repr(error))

    def _failed(self, reason: str) -> None:
        if not self.failures:
            logger.warning(
                "run.trackers: %s failed, the run goes on without it (%s)",
                self._name,
                shorten(reason, CAPTION),
            )
        self.failures += 1

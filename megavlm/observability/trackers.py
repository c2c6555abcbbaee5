"""Experiment trackers in addition to TensorBoard: Weights & Biases, and classes of a user.

Each tracker works in its own thread, so that a slow network delays no step, and an error of a
tracker cannot end a run. The environment variables of the trackers' packages set where they write
and with which key.
"""

import importlib
import importlib.util
import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, Protocol

from megavlm.import_path import import_object, import_of_key
from megavlm.observability.text import shorten
from megavlm.writing import write_whole

WANDB = "wandb"  # the name of WandbTracker and of its package
PROJECT = "megavlm"  # default project; the environment may name another
IDS_FILE = "trackers.json"  # in the run directory: the run's id in each tracker, for a resume
WAITING = 1000  # most records that wait for a tracker's network; others are dropped and counted
CLOSE_SECONDS = 60.0  # how long the end of a run waits for each tracker
CAPTION = 500  # characters
IMAGES = 2  # images of a group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it. id: its id in the tracker; with None the tracker makes one."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class TrackedImage:
    """Image of a sampled prompt. caption: the prompt and its first response."""

    path: Path
    caption: str


class Tracker(Protocol):
    """Run in a tracker's package. The functions of these packages may raise anything."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or continue the run with the id."""

    id: str

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def images(self, step: int, images: Sequence[TrackedImage]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Run of Weights & Biases.

    Its own step counter must rise, but a resumed run repeats steps, so the step is a metric.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = importlib.import_module("wandb")
        self.id = run.id or uuid.uuid4().hex[:8]
        self._run = self._wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else PROJECT,
            id=self.id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(console="off"),  # else it logs redraws of the live line
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def images(self, step: int, images: Sequence[TrackedImage]) -> None:
        shown = [self._wandb.Image(str(image.path), caption=image.caption) for image in images]
        self._run.log({"step": step, "samples": shown})

    def close(self) -> None:
        self._run.finish()


def tracker_class(name: str) -> type[Tracker]:
    """Return the tracker that run.trackers names. May raise anything for a class of a user."""
    return WandbTracker if name == WANDB else import_object(name)


def check_trackers(names: Iterable[str]) -> None:
    """Raise ValueError for a tracker that is not installed, or cannot be imported."""
    for name in names:
        if name != WANDB:
            import_of_key("run.trackers", name)
        elif importlib.util.find_spec(WANDB) is None:
            raise ValueError(
                "run.trackers=wandb needs the package wandb, but it is not installed: pip install "
                "'megavlm[wandb]', or remove it"
            )


class Trackers:
    """The trackers of a run; used by one process, the driver. None of them can end the run."""

    def __init__(
        self, names: Sequence[str], folder: Path | str, config: Mapping[str, Any], start_step: int
    ) -> None:
        """Begin the runs, or continue the runs recorded in `folder` if start_step is above 0."""
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
        """Number of records so far that did not reach a tracker."""
        return sum(thread.failures for thread in self._threads)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite values of a step."""
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
        """End the runs. Records that could not be sent within CLOSE_SECONDS are lost."""
        for thread in self._threads:
            thread.close()


def _caption(group: Mapping[str, Any]) -> str:
    first = group["responses"][0]
    end = f"reward {first['reward']:.3g}, answer {group['answer']}"
    return shorten(f"{group['prompt']}\n\n{first['text']}\n\n{end}", CAPTION)


class TrackerThread:
    """Thread that creates a tracker's run and sends it records, one after another.

    The tracker's package works over a network and may raise anything. An error counts as a failure
    of the record that was being sent; the thread pool reports it.
    """

    def __init__(self, name: str, run: TrackedRun, begun: Callable[[str, str], None]) -> None:
        """Start the thread. begun: called with the tracker's name and the id of its begun run."""
        self._name, self._run, self._begun = name, run, begun
        self._tracker: Tracker | None = None
        self._num_sent = self._num_done = self.failures = 0
        self._pool = ThreadPool(1)  # daemon threads: one that hangs does not keep the process alive
        self._work(self._start)

    def send(self, work: Callable[[Tracker], None]) -> None:
        """Queue `work` for the thread, or count a failure if too many records wait."""
        if self._num_sent - self._num_done > WAITING:
            self._failed("it takes records more slowly than they come")
        else:
            self._work(lambda: work(self._start()))

    def close(self) -> None:
        self._work(self._end).wait(CLOSE_SECONDS)
        self._pool.close()

    def _work(self, work: Callable[[], object]) -> "AsyncResult[object]":
        self._num_sent += 1
        return self._pool.apply_async(work, callback=self._done, error_callback=self._raised)

    def _done(self, result: object = None) -> None:
        self._num_done += 1

    def _raised(self, error: BaseException) -> None:
        self._done()
        self._failed(repr(error))

    def _start(self) -> Tracker:
        """Return the tracker. If it could not begin before, try again: the network may be back."""
        if self._tracker is None:
            tracker = tracker_class(self._name)(self._run)
            self._begun(self._name, tracker.id)
            self._tracker = tracker
        return self._tracker

    def _end(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def _failed(self, reason: str) -> None:
        if not self.failures:
            logger.warning(
                "run.trackers: %s failed, the run goes on without it (%s)",
                self._name,
                shorten(reason, CAPTION),
            )
        self.failures += 1

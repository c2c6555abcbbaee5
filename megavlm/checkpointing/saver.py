"""Saves the steps of one run while it trains."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

import torch
import torch.distributed as dist

from megavlm.checkpointing.save import PendingSave, SaveTarget, begin_save
from megavlm.checkpointing.state import TrainedState
from megavlm.parallel import platform
from megavlm.parallel.mesh import TIMEOUT
from megavlm.process import CheckpointError

JOIN_TIMEOUT = 60.0  # seconds

logger = logging.getLogger(__name__)


class Saver:
    """Saves one step at a time. With `background`, a thread on each rank writes while training
    continues.

    It is a thread rather than a forked process because CUDA and NCCL do not survive a fork. The
    threads of the ranks communicate over their own gloo group, so that their collectives cannot be
    mixed up with those of training. A step that all ranks have written is published even if
    training fails meanwhile. Each rank holds a second copy of its shards in host memory until they
    are written.

    If a save fails, the next call of any method raises CheckpointError on all ranks. As a context
    manager it finishes a save that was begun, even if the body raised.
    """

    def __init__(self, target: SaveTarget, *, background: bool) -> None:
        """Create the ranks' group. Collective."""
        self._target = target
        self._background = background
        self._running: Future[None] | None = None
        self._what = ""
        self._group: dist.ProcessGroup | None = None
        if background:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._threads = ThreadPoolExecutor(1, "checkpoint")

    def save(
        self,
        step: int,
        state: TrainedState,
        *,
        extra: dict[str, Any],
        scores: Mapping[str, float] | None = None,
        companion: Callable[[bool], PendingSave] | None = None,
    ) -> None:
        """Save a step, or begin to save it in the background, after any earlier save has finished.
        Collective.

        companion: Begins another save that must be complete before the step is published. Its
            argument is True if training continues meanwhile.

        The other arguments are the same as in `save_checkpoint`.
        """
        self.finish()
        before = [] if companion is None else [companion(self._background)]
        pending = begin_save(
            self._target, step, state, extra=extra, scores=scores, copy=self._background
        )
        if not self._background:
            _complete([*before, pending], None)
            return
        self._what = pending.what
        self._running = self._threads.submit(_complete, [*before, pending], self._group)

    def poll(self) -> None:
        """Check without waiting whether a save has ended, and raise if it failed. Collective."""
        if self._running is not None:
            running, failed = self._status()
            if failed or not running:
                self._end(failed)

    def finish(self) -> None:
        """Block until nothing is being written. Collective."""
        if self._running is not None:
            wait([self._running])
            self._end(self._status()[1])

    def _status(self) -> tuple[bool, bool]:
        """Return whether the save still runs on any rank, and whether it failed on any rank.
        Collective.
        """
        assert self._running is not None
        done = self._running.done()
        failed = done and self._running.exception() is not None
        votes = torch.tensor([float(not done), float(failed)], device=platform.device())
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        running, any_failed = votes.tolist()
        return running > 0, any_failed > 0

    def _end(self, failed: bool) -> None:
        running, self._running = self._running, None
        assert running is not None
        wait([running], JOIN_TIMEOUT)  # after a failure on one rank all threads end soon
        if running.done():
            running.result()  # raises what the thread raised
        if failed:
            raise CheckpointError(f"{self._what} failed on another rank.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        elif self._running is not None:
            # No collective, since other ranks may not take part: wait only for this rank's thread.
            if problem := self._running.exception():
                logger.warning("%s", problem)


def _complete(saves: Sequence[PendingSave], group: dist.ProcessGroup | None) -> None:
    """Complete saves in order. If one fails, the saves after it are abandoned."""
    for index, pending in enumerate(saves):
        try:
            pending.complete(group)
        except CheckpointError:
            for later in saves[index + 1 :]:
                later.abandon()
            raise

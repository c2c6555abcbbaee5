"""Saves the steps of one run while it trains."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megavlm.checkpointing.adapters import AdapterSettings
from megavlm.checkpointing.retention import Retention
from megavlm.checkpointing.save import Saving, begin
from megavlm.checkpointing.together import CheckpointError
from megavlm.parallel import platform

PATIENCE = 60.0  # seconds

logger = logging.getLogger(__name__)


class Saver:
    """One save at a time; with `background` training goes on while a thread of each rank writes.

    A thread and not a forked process, because CUDA and NCCL do not survive a fork. The ranks'
    threads agree over a gloo group of their own, so none of their collectives can meet one of
    training's; a step that all ranks have written appears even if training fails meanwhile. Each
    rank holds its own shards once more in host memory until they are written.

    A save that failed raises CheckpointError on all ranks at the next call of any method. As a
    context it finishes what was begun, also where the body raised.
    """

    def __init__(
        self,
        folder: Path,
        *,
        hf_folder: Path,
        adapters: AdapterSettings | None = None,
        retention: Retention,
        background: bool,
    ) -> None:
        """Collective over all ranks."""
        self._where: dict[str, Any] = {
            "folder": folder,
            "hf_folder": hf_folder,
            "adapters": adapters,
            "retention": retention,
        }
        self._background = background
        self._running: Future[None] | None = None
        self._what = ""
        self._group: dist.ProcessGroup | None = None
        if background:
            self._group = dist.new_group(backend="gloo")
            self._threads = ThreadPoolExecutor(1, "checkpoint")

    def save(
        self,
        step: int,
        *,
        chunks: Sequence[MegatronModule],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        extra: dict[str, Any],
        scores: Mapping[str, float] | None = None,
        companion: Callable[[bool], Saving] | None = None,
    ) -> None:
        """Takes the step, and writes it or lets a thread do so; waits for an earlier save first.

        Collective, as `megavlm.checkpointing.save` is. `companion`: begins another save, told
        whether training goes on meanwhile, that must be complete before the step appears.
        """
        self.finish()
        before = [] if companion is None else [companion(self._background)]
        saving = begin(
            **self._where,
            step=step,
            chunks=chunks,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            scores=scores,
            copy=self._background,
        )
        if not self._background:
            _complete([*before, saving], None)
            return
        self._what = saving.what
        self._running = self._threads.submit(_complete, [*before, saving], self._group)

    def poll(self) -> None:
        """Between two steps: notes that a save has ended, on all ranks, and how. Collective."""
        if self._running is not None:
            running, failed = self._ask()
            if failed or not running:
                self._end(failed)

    def finish(self) -> None:
        """Waits until nothing is being written. Collective."""
        if self._running is not None:
            wait([self._running])
            self._end(self._ask()[1])

    def _ask(self) -> tuple[bool, bool]:
        """Whether the save runs on any rank, and whether it failed on any: the same on all."""
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
        wait([running], PATIENCE)  # where one rank's thread has failed, all know and end now
        if running.done():
            running.result()  # raises what the thread raised
        if failed:
            raise CheckpointError(f"{self._what} failed on another rank.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        elif self._running is not None:
            # Not together: other ranks may be anywhere. Their threads go on while they live.
            if problem := self._running.exception():
                logger.warning("%s", problem)


def _complete(savings: Sequence[Saving], group: dist.ProcessGroup | None) -> None:
    """In order; after one that fails nothing is left of those behind it."""
    for place, saving in enumerate(savings):
        try:
            saving.complete(group)
        except CheckpointError:
            for later in savings[place + 1 :]:
                later.abandon()
            raise

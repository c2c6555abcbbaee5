"""Reward functions in a pool of processes with limits."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from megavlm.rewards.base import ResponseDetails
from megavlm.rewards.registry import RewardArguments
from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.process import LimitedProcess

MAX_SCORES = 2**20  # bytes: the scores of a group
Rewards = Sequence[tuple[str, Mapping[str, Any], str]]  # names, options and their keys


class RewardProcess(LimitedProcess):
    def __init__(self, rewards: Rewards, memory_mb: int) -> None:
        """Start the process. Raises ValueError if a function cannot be loaded or rejects its
        options.
        """
        names = ", ".join(name for name, *_ in rewards)
        super().__init__(
            "megavlm.rewards.worker",
            {"rewards": rewards},
            what=f"reward ({names})",
            memory_mb=memory_mb,
            max_reply=MAX_SCORES,
        )
        self.takes = [RewardArguments(**found) for found in self.reply["takes"]]


class RewardPool:
    """Processes that are reused, and replaced when killed at a limit."""

    def __init__(self, rewards: Rewards, *, workers: int, timeout: float, memory_mb: int) -> None:
        """Start one process now, and up to `workers` processes when there is work. timeout: seconds
        for one call of a function. Raises ValueError if a function cannot be loaded.
        """
        self._rewards, self._timeout, self._memory_mb = rewards, timeout, memory_mb
        # A process ends with the thread that started it, so each thread keeps its own process.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._processes: dict[int, RewardProcess] = {}  # by thread
        try:
            self.takes = self._threads.submit(self._process).result().takes
        except ValueError:
            self.close()
            raise

    def submit(
        self,
        function: int,
        responses: Sequence[str],
        details: Sequence[ResponseDetails],
        row: Mapping[str, Any],
        images: Sequence[bytes],
        options: Mapping[str, Any],
    ) -> "Future[list[dict[str, Any]]]":
        """Call rewards[function] for responses to one row: one, or a group if it scores groups. The
        future returns {reward, correct, parts} of each, or raises CallFailure.
        """

        def call() -> list[dict[str, Any]]:
            try:
                process = self._process()
            except ValueError as error:
                raise CallFailure("crash", str(error)) from error
            context: dict[str, Any] = {}
            for name in self.takes[function].context:
                if name == "images":  # sent once, because all responses are to the same images
                    context[name] = list(images)
                elif name == "token_ids":
                    context[name] = [np.asarray(of_one.token_ids).tolist() for of_one in details]
                else:
                    context[name] = [getattr(of_one, name) for of_one in details]
            request = {
                "function": function,
                "responses": list(responses),
                "row": row,
                "context": context,
                "options": options,
            }
            scores: list[dict[str, Any]] = process.call(request, self._timeout)["scores"]
            return scores

        return self._threads.submit(call)

    def _process(self) -> RewardProcess:
        """Return this thread's process, a new one if it has none that lives."""
        thread = threading.get_ident()
        process = self._processes.get(thread)
        if process is None or not process.alive:
            process = self._processes[thread] = RewardProcess(self._rewards, self._memory_mb)
        return process

    def close(self) -> None:
        """Wait for running work, and end all processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes.values():
            process.kill()

"""Pools of processes with limits, which are kept, and replaced when one was killed at a limit. A
subprocess with limits is no security boundary against hostile code. It bounds the cost of a faulty
reward, and the cost that a model's text can cause in a correct one.
"""

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from megavlm.rewards.base import RewardFailure
from megavlm.rewards.process import LimitedProcess, RewardProcess, Rewards

P = TypeVar("P", bound=LimitedProcess)
T = TypeVar("T")


class ProcessPool(Generic[P]):
    def __init__(self, start: Callable[[], P], *, workers: int) -> None:
        """Start one process, and up to `workers` when there is work. Raises what `start` raises."""
        self._start = start
        # A process ends with the thread that started it, so each thread keeps one of its own.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="limited")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._processes: list[P] = []
        self._has_started = self.closed = False
        try:
            self.submit(lambda _: None).result()
        except ValueError:
            self.close()
            raise
        self._has_started = True

    def submit(self, work: Callable[[P], T]) -> "Future[T]":
        """Run `work` with a live process; the future raises RewardFailure if none starts."""
        return self._threads.submit(lambda: work(self._process()))

    def _process(self) -> P:
        process: P | None = getattr(self._mine, "process", None)
        if process is None or not process.alive:
            if process is not None:
                with self._lock:
                    self._processes.remove(process)
                self._mine.process = None
            try:
                process = self._start()
            except ValueError as error:
                if self._has_started:
                    raise RewardFailure("crash", str(error)) from error
                raise
            self._mine.process = process
            with self._lock:
                self._processes.append(process)
        return process

    def close(self) -> None:
        """Wait for running work, and end all processes."""
        self.closed = True
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._processes.clear()


class RewardPool:
    def __init__(self, rewards: Rewards, *, workers: int, timeout: float, memory_mb: int) -> None:
        """Start the first process. timeout: seconds for one function and response. Raises
        ValueError if a function cannot be loaded.
        """
        self._timeout = timeout
        self._pool = ProcessPool(lambda: RewardProcess(rewards, memory_mb), workers=workers)
        self.takes = self._pool.submit(lambda process: process.takes).result()

    def submit(
        self,
        function: int,
        response: str,
        row: Mapping[str, Any],
        images: Sequence[bytes],
        options: Mapping[str, Any],
    ) -> "Future[dict[str, Any]]":
        """Call rewards[function]; the future returns {reward, correct, parts} or raises
        RewardFailure.
        """

        def call(process: RewardProcess) -> dict[str, Any]:
            encoded = None
            if "images" in self.takes[function]:
                encoded = [base64.b64encode(image).decode() for image in images]
            request = {
                "function": function,
                "response": response,
                "row": row,
                "images": encoded,
                "options": options,
            }
            return process.call(request, self._timeout)

        return self._pool.submit(call)

    def close(self) -> None:
        self._pool.close()

"""Pools of processes with limits. Processes are reused, and replaced when killed at a limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.process import LimitedProcess

P = TypeVar("P", bound=LimitedProcess)
T = TypeVar("T")


class ProcessPool(Generic[P]):
    def __init__(self, start: Callable[[], P], *, workers: int) -> None:
        """Start one process now, and up to `workers` processes when there is work. Raises the error
        of `start` if the first process does not start.
        """
        self._start = start
        # A process ends with the thread that started it, so each thread keeps its own process.
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
        """Run `work` with a live process. The future raises CallFailure if no process starts."""
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
                    raise CallFailure("crash", str(error)) from error
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

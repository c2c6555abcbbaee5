"""Reward processes that are kept, and replaced when one was killed at a limit.

What this is not: a subprocess with limits is no boundary against hostile code. It bounds what a
faulty reward costs, and what a model's text can make a correct one cost.
"""

import base64
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megavlm.rewards.base import RewardFailure
from megavlm.rewards.process import RewardProcess, Rewards


class RewardPool:
    def __init__(self, rewards: Rewards, *, workers: int, timeout: float, memory_mb: int) -> None:
        """Starts one process, and up to `workers` when there is work. `timeout`: seconds for one
        function and response. Raises ValueError where a function cannot be loaded.
        """
        self._rewards, self._timeout, self._memory_mb = rewards, timeout, memory_mb
        # A process ends with the thread that started it, so each thread keeps one of its own.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._processes: list[RewardProcess] = []
        try:
            self.takes = self._threads.submit(lambda: self._process().takes).result()
        except ValueError:
            self.close()
            raise

    def submit(
        self,
        function: int,
        response: str,
        row: Mapping[str, Any],
        pictures: Sequence[bytes],
        options: Mapping[str, Any],
    ) -> "Future[dict[str, Any]]":
        """{reward, correct, parts} of rewards[function]; the future raises RewardFailure."""
        return self._threads.submit(self._call, function, response, row, pictures, options)

    def _call(
        self,
        function: int,
        response: str,
        row: Mapping[str, Any],
        pictures: Sequence[bytes],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        encoded = None
        if "pictures" in self.takes[function]:
            encoded = [base64.b64encode(picture).decode() for picture in pictures]
        request = {
            "function": function,
            "response": response,
            "row": row,
            "pictures": encoded,
            "options": options,
        }
        return self._process().call(request, self._timeout)

    def _process(self) -> RewardProcess:
        process: RewardProcess | None = getattr(self._mine, "process", None)
        if process is None or not process.alive:
            if process is not None:
                with self._lock:
                    self._processes.remove(process)
                self._mine.process = None
            try:
                process = RewardProcess(self._rewards, self._memory_mb)
            except ValueError as error:
                if hasattr(self, "takes"):  # it has started before
                    raise RewardFailure("crash", str(error)) from error
                raise
            self._mine.process = process
            with self._lock:
                self._processes.append(process)
        return process

    def close(self) -> None:
        """Waits for what runs, and leaves no process."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._processes.clear()

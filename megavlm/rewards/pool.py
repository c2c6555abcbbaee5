"""Reward functions in a pool of processes with limits."""

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megavlm.limited.pool import ProcessPool
from megavlm.limited.process import LimitedProcess

Rewards = Sequence[tuple[str, Mapping[str, Any]]]  # names and options


class RewardProcess(LimitedProcess):
    def __init__(self, rewards: Rewards, memory_mb: int) -> None:
        """Start the process. Raises ValueError if a function cannot be loaded or rejects its
        options.
        """
        names = ", ".join(name for name, _ in rewards)
        super().__init__(
            "megavlm.rewards.worker",
            {"rewards": rewards},
            what=f"reward ({names})",
            memory_mb=memory_mb,
        )
        self.takes: list[set[str]] = [set(arguments) for arguments in self.reply["takes"]]


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
        CallFailure.
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

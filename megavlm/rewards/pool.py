"""Reward functions in a pool of processes with limits."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from megavlm.rewards.base import ResponseDetails
from megavlm.rewards.registry import RewardArguments
from megavlm.subprocess_pool.pool import ProcessPool
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
    def __init__(self, rewards: Rewards, *, workers: int, timeout: float, memory_mb: int) -> None:
        """Start the first process. timeout: seconds for one call of a function. Raises
        ValueError if a function cannot be loaded.
        """
        self._timeout = timeout
        self._pool = ProcessPool(lambda: RewardProcess(rewards, memory_mb), workers=workers)
        self.takes = self._pool.submit(lambda process: process.takes).result()

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

        def call(process: RewardProcess) -> list[dict[str, Any]]:
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

        return self._pool.submit(call)

    def close(self) -> None:
        self._pool.close()

"""Environments of a user's class, each call in a process with limits on time and memory."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments import registry, wire
from megavlm.environments.base import Context, Environment, Observation, Step
from megavlm.limited.pool import ProcessPool
from megavlm.limited.process import LimitedProcess
from megavlm.rewards.base import Example

MAX_ENVIRONMENT_REPLY = 2**28  # bytes: an environment with its row's images, and an observation


class Local:
    """Built-in environments. They run in the trainer's process, as they need very little time."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        """Load the class. Raises ValueError for unknown options."""
        self._options = settings.options
        self._class = registry.load_environment(settings.name, settings.options)
        self.timeout: float | None = settings.timeout  # seconds for a call; the caller enforces it

    def make(self, context: Context) -> Environment:
        return registry.make(self._class, context, self._options)

    def close(self) -> None:
        pass


class EnvironmentPool:
    """Environments of a user's class in processes with limits, with the interface of Local."""

    timeout = None  # enforced here, not by the caller

    def __init__(self, settings: EnvironmentConfig) -> None:
        """Start the first process. Raises ValueError if the class cannot be loaded."""

        def start() -> LimitedProcess:
            return LimitedProcess(
                "megavlm.environments.worker",
                {"name": settings.name, "options": settings.options},
                what="environment",
                memory_mb=settings.memory_mb,
                max_reply=MAX_ENVIRONMENT_REPLY,
            )

        self._timeout = settings.timeout  # for a reset or step, not counting rewards
        self._pool = ProcessPool(start, workers=settings.workers)

    def make(self, context: Context) -> "RemoteEnvironment":
        return RemoteEnvironment(self, context)

    async def call(self, request: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Send a request to a process and return its reply. Raises CallFailure, and any error of
        context.score.
        """
        loop = asyncio.get_running_loop()

        def talk(process: LimitedProcess) -> dict[str, Any]:
            with ExitStack() as stack:
                stack.callback(process.kill)  # after an error, it may be amid a conversation
                reply = self._talk(process, request, context, loop)
                stack.pop_all()
            return reply

        return await asyncio.wrap_future(self._pool.submit(talk))

    def _talk(
        self,
        process: LimitedProcess,
        request: Mapping[str, Any],
        context: Context,
        loop: asyncio.AbstractEventLoop,
    ) -> dict[str, Any]:
        left = self._timeout
        while True:
            started = time.monotonic()
            reply = process.call(request, max(left, 0.01))
            left -= time.monotonic() - started
            if "ask" not in reply:
                return reply
            answers = asyncio.run_coroutine_threadsafe(_scores(reply["ask"], context), loop)
            while not self._pool.closed:
                if futures.wait([answers], timeout=0.5).done:
                    break
            request = {"scores": answers.result(timeout=0)}

    def close(self) -> None:
        self._pool.close()


def make_environments(settings: EnvironmentConfig) -> Local | EnvironmentPool:
    """Load the environment. A user's class runs in processes, the first of which starts here.

    Raises ValueError if it cannot be loaded or does not have the options.
    """
    is_built_in = registry.find_environment(settings.name).is_built_in
    return Local(settings) if is_built_in else EnvironmentPool(settings)


class RemoteEnvironment:
    """Environment as a pickle. Only worker processes unpickle it."""

    def __init__(self, pool: EnvironmentPool, context: Context) -> None:
        self._pool, self._context = pool, context
        self._pickle = ""

    async def reset(self, row: Example, seed: int) -> Observation:
        request = {
            "row": wire.pack_row(row),
            "seed": seed,
            "max_turns": self._context.max_turns,
        }
        reply = await self._pool.call(request, self._context)
        self._pickle = reply["environment"]
        return wire.unpack_observation(reply["observation"])

    async def step(self, text: str) -> Step:
        request = {"environment": self._pickle, "text": text}
        reply = await self._pool.call(request, self._context)
        self._pickle = reply.get("environment", "")
        return wire.unpack_step(reply)


async def _scores(questions: Sequence[Any], context: Context) -> list[dict[str, Any]]:
    found = await asyncio.gather(
        *(context.score(text, wire.unpack_row(row)) for text, row in questions)
    )
    return [asdict(score) for score in found]

"""The time limit of an environment's calls, while a weight push stops the event loop."""

import asyncio
import os
import time
from typing import Any

import pytest

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments.base import ChatFormat, Step
from megavlm.rewards.base import ResponseDetails
from megavlm.rollout.timed_environment import TimedEnvironment
from megavlm.subprocess_pool.failure import CallFailure

LIMIT = 0.4  # seconds


class Piped:
    """An environment whose step ends when a byte arrives through a pipe."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()

    async def step(self, text: str) -> Step:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(self.source, lambda: arrived.done() or arrived.set_result(None))
        await arrived
        loop.remove_reader(self.source)
        return Step(None, 1.0, True)


@pytest.mark.parametrize("is_answered", [True, False])
def test_only_time_in_which_the_loop_runs_counts(is_answered: bool) -> None:
    nothing: Any = None
    timed = TimedEnvironment(nothing, EnvironmentConfig(timeout=LIMIT), ChatFormat(), nothing, "it")
    timed._environment = piped = Piped()

    async def begin() -> "asyncio.Task[Step]":
        task = asyncio.create_task(timed.step("", ResponseDetails(), {}))
        await asyncio.sleep(0)
        return task

    async def end(task: "asyncio.Task[Step]") -> Step:
        return await task

    with asyncio.Runner() as runner:
        task = runner.run(begin())
        if is_answered:
            os.write(piped.sink, b"x")
        time.sleep(2 * LIMIT)  # a push
        if is_answered:
            assert runner.run(end(task)).reward == 1.0
        else:
            with pytest.raises(CallFailure, match=r"it: no answer in 0.4 s"):
                runner.run(end(task))

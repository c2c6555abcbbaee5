"""Rollout producer: a process whose engine plays groups while the trainer trains
(rollout.max_staleness above 0, or rollout.streaming). The trainer starts it as `python -m
megavlm.rollout.ahead.producer DESCRIPTOR`.

It is a process because a thread would hold the GIL and stall the trainer's kernel launches. It uses
no GPU. It starts prompts only when a step of the trainer begins, so that at most max_staleness + 1
steps' worth of prompts are started and not yet trained on. A step gets the groups whose prompts
were drawn first: the producer waits for a slow response and does not leave it out, so there is no
bias towards short responses, and no group is older than max_staleness steps. A group that is older
anyway, for example after a resume with a lower max_staleness, is dropped and counted. So is a group
whose request times out (rollout.on_timeout).

With rollout.oversample above 1, groups that are played are handed over before slower ones that were
drawn earlier (partial rollouts). Fewer prompts are started then, so that a slow group has several
steps until it is max_staleness steps old; the producer waits for it only then.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from megavlm.config.schema import Config
from megavlm.data.rows import Row
from megavlm.data.shared_pickle import SharedPickle, TensorPickler
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.requests import RequestLimits
from megavlm.parallel import platform
from megavlm.process import allow_open_files, die_with, leave, leave_to_parent
from megavlm.rewards.base import RewardStop
from megavlm.rollout.ahead.mirror import ServerProxy
from megavlm.rollout.engine import Engine
from megavlm.rollout.sampler import Sampler

TICK = 0.05  # seconds between checks of whether the servers are idle


@dataclass(frozen=True)
class ProducerSetup:
    """Arguments of a producer. parent: Process id of the trainer."""

    config: Config
    limits: RequestLimits
    parent: int


class _GroupPickler(TensorPickler):
    """Pickler of groups whose rows leave their encoded images, videos and audio behind."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Row) and (*value.images, *value.videos, *value.audio, *value.extra):
            return replace(value, images=(), videos=(), audio=(), extra={}).__reduce_ex__(5)
        return super().reducer_override(value)


class Producer:
    def __init__(self, setup: ProducerSetup, connection: Connection) -> None:
        """Load the data, the environment and the rewards. Raises ValueError if that fails."""
        self._connection, self._parent = connection, setup.parent
        self._servers = ServerProxy(lambda report: connection.send(("report", report)))
        self._client = RolloutClient(
            self._servers, setup.limits, beat=lambda: connection.send(("beat",))
        )
        self._sampler = Sampler(setup.config, self._client)
        self._engine = Engine(self._sampler, self._wait_for_push, pushes_ahead=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = 0.0  # idle seconds of the servers since the last step's groups were taken

    def run(self) -> None:
        """Serve the trainer until it is gone. Raises the error that ends the rollouts."""
        self._client.runner.run(self._serve())

    async def _serve(self) -> None:
        loop, self._servers_changed = asyncio.get_running_loop(), asyncio.Event()
        self._ended = loop.create_future()
        # Any failure ends the process, and with it the run.
        loop.set_exception_handler(lambda _, context: self._fail(context.get("exception")))
        loop.add_reader(self._connection.fileno(), self._receive)
        watch = loop.create_task(self._watch())
        try:
            await self._ended
        finally:
            loop.remove_reader(self._connection.fileno())
            for task in (watch, *self._tasks):
                task.cancel()
            await asyncio.gather(watch, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Count the seconds in which the servers have no requests."""
        while True:
            await asyncio.sleep(TICK)
            self._idle += TICK * self._client.is_idle

    def close(self) -> None:
        """End the processes of data, environments and rewards."""
        self._client.run(self._engine.end())
        self._sampler.close()
        self._client.close()

    def _receive(self) -> None:
        """Handle one message from the trainer: a name, and the arguments of its handler."""
        try:
            name, *arguments = self._connection.recv()
        except (EOFError, OSError):
            if not self._ended.done():
                self._ended.set_result(None)
            return
        handlers: dict[str, Callable[..., None]] = {
            "load": self._engine.load_state_dict,
            "servers": self._update_servers,
            "begin": lambda *step: self._run(self._engine.start(self._engine.begin(*step))),
            "take": lambda least_tokens: self._run(self._hand_over(least_tokens)),
            "state": lambda: self._connection.send(("state", self._engine.state_dict())),
        }
        handlers[name](*arguments)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _update_servers(self, servers: Any) -> None:
        self._servers.update(servers)
        self._servers_changed.set()

    async def _wait_for_push(self) -> None:
        """Tell the trainer that no server has usable weights, and wait until the servers change."""
        self._servers_changed.clear()
        self._connection.send(("refit",))
        await self._servers_changed.wait()

    async def _hand_over(self, least_tokens: int | None) -> None:
        """Send the next groups of the step."""
        streamed = await self._engine.take(least_tokens)
        measures: dict[str, float] = {}
        if streamed.is_last:
            measures, self._idle = self._engine.measures | {"servers_idle": self._idle}, 0.0
        self._connection.send(("batch", streamed.indices, streamed.is_last, measures))
        groups = SharedPickle.of([*streamed.groups, *streamed.left_out], _GroupPickler)
        groups.send(self._connection, self._parent)


def serve(connection: Connection, setup: ProducerSetup) -> bool:
    """Produce until the trainer is gone. Returns False after an error; the error was sent to the
    trainer.
    """
    with ExitStack() as stack:  # environments are closed after an error, too
        try:
            producer = Producer(setup, connection)
            stack.callback(producer.close)
            producer.run()
        except (ValueError, RolloutServerError, RolloutRequestError, RewardStop) as error:
            connection.send(("error", error))
            return False
    return True


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    # The pickle is trusted: the trainer sent it through a private pipe.
    setup: ProducerSetup = connection.recv()
    die_with(setup.parent)
    leave_to_parent()
    allow_open_files()
    platform.install()
    leave(0 if serve(connection, setup) else 2)  # exit at once: tasks may still run after an error


if __name__ == "__main__":
    main()

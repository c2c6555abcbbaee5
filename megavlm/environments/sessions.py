"""Trainer's side of sessions: environments of a user's class that live in a process with limits,
from their reset to their close. A process has many sessions, whose messages share its socket.
"""

import asyncio
import logging
import math
import os
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Any

from megavlm.environments import wire
from megavlm.environments.base import Context, Observation, Step
from megavlm.rewards.base import Example
from megavlm.subprocess_pool.failure import CallFailure, FailureKind
from megavlm.subprocess_pool.process import START_SECONDS, ChildProcess, shown
from megavlm.subprocess_pool.wire import Replies, frame

logger = logging.getLogger(__name__)

MAX_ENVIRONMENT_REPLY = 2**28  # bytes: an observation with its images
ANSWER_SECONDS = 10.0  # that a process has to show that it is not stuck as a whole
TICK = 0.5  # seconds
KEPT_OUTPUT = 2**12  # bytes

Future = asyncio.Future[dict[str, Any]]


class SessionProcess(ChildProcess):
    """A process with sessions.

    sessions: The sessions that are open, by number. started: Task that ends when the user's class
    is loaded. It raises ValueError if the class cannot be loaded.
    """

    def __init__(self, setup: Mapping[str, Any], *, memory_mb: int, timeout: float) -> None:
        """Start the process. timeout: Seconds that a session has to close."""
        super().__init__(
            "megavlm.environments.worker", setup, what="environment", memory_mb=memory_mb
        )
        self.sessions: dict[int, RemoteEnvironment] = {}
        self._timeout = timeout
        self._printed, self._replies = _Output(), Replies(MAX_ENVIRONMENT_REPLY)
        self._ids = count()
        self._waiting: dict[int, Future] = {}
        self._failure: tuple[FailureKind, str] | None = None
        self._stuck: set[RemoteEnvironment] = set()  # a call of theirs was given up
        self._is_loaded = self._is_retired = self._warned = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.started = asyncio.create_task(self._start())

    @property
    def takes_sessions(self) -> bool:
        return self._failure is None and not self._is_retired and not self._stuck

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        # The transports close what they are given, and `kill` its own.
        self._transport, _ = await loop.create_connection(
            lambda: _Control(self), sock=self.control.dup()
        )
        output = os.fdopen(os.dup(self.output.fileno()), "rb", buffering=0)
        await loop.connect_read_pipe(lambda: self._printed, output)
        loaded = self.send(self.setup)
        if not await within(loaded, START_SECONDS):
            self.end("timeout", f"no answer in {START_SECONDS:g} s")
        try:
            reply = await loaded
        except CallFailure as failure:
            raise self.start_error(failure, self._printed.tail) from failure
        if "error" in reply:
            self.end("crash", reply["error"])
        self.check_start(reply)
        self._is_loaded = True

    def send(self, message: Mapping[str, Any]) -> Future:
        """Send a message, and return the future of its reply. The future raises CallFailure if the
        process ends. Raises CallFailure itself for a value that cannot be sent.
        """
        number = next(self._ids)
        sent = frame({**message, "id": number})
        reply: Future = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            reply.set_exception(CallFailure(*self._failure))
            return reply
        # Nobody may wait for it any more when the process ends.
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[number] = reply
        self._transport.write(sent)
        return reply

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no reply."""
        if self._failure is None:
            self._transport.write(frame(message))

    def receive(self, data: bytes) -> None:
        try:
            messages = self._replies.add(data)
        except CallFailure as failure:
            self.end(failure.kind, str(failure))
            return
        for message in messages:
            if "ask" in message:
                if session := self.sessions.get(message["session"]):
                    session.answer(message)
                continue
            reply = self._waiting.pop(message["id"], None)
            if message.get("failure") == "memory":  # the state of the process is unknown
                self.end("memory", message["message"])
            if reply is not None and not reply.done():
                if "failure" in message:
                    reply.set_exception(CallFailure(message["failure"], message["message"]))
                else:
                    reply.set_result(message)

    def lose(self) -> None:
        """Note that the process ended by itself."""
        if self._failure is None:
            with suppress(BlockingIOError):
                while data := os.read(self.output.fileno(), 2**16):
                    self._printed.data_received(data)
            death = self.death()
            printed = shown(self._printed.tail) if self._is_loaded else ""
            self.end(death.kind, death.message + (f"; it printed: {printed}" if printed else ""))

    def end(self, kind: FailureKind, message: str) -> None:
        """Kill the process. All its sessions fail with this failure."""
        if self._failure is not None:
            return
        self._failure = kind, message
        self.kill()
        self._transport.abort()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for reply in waiting:
            if not reply.done():
                reply.set_exception(CallFailure(kind, message))

    def close(self, session: "RemoteEnvironment", *, gave_up: bool) -> None:
        """Begin to close a session. gave_up: True if a call of it was given up. The process then
        takes no sessions until this one has closed, and must show that it still answers.
        """
        reply = self.send({"close": session.number, "session": session.number})
        self._do(self._wait_closed(session, reply))
        if gave_up and self._failure is None:
            self._stuck.add(session)
            self._do(self._check_answers())

    async def close_all(self, seconds: float) -> None:
        """Close all sessions, within `seconds`, and end the process."""
        await asyncio.wait([self.started], timeout=seconds)
        for session in list(self.sessions.values()):
            session.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        self.end("crash", "the run has ended")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_closed(self, session: "RemoteEnvironment", reply: Future) -> None:
        if not await within(reply, self._timeout):
            self._is_retired = True
            self._warn(f"no answer in {self._timeout:g} s")
        elif (error := reply.exception()) is not None:
            self._warn(str(error))
        else:
            self._stuck.discard(session)
            found = reply.result()
            self._is_retired |= found["left_children"]
            if "error" in found:
                self._warn(found["error"])
        self.sessions.pop(session.number, None)
        if self._is_retired and not self.sessions:
            self.end("crash", "it takes no more sessions")

    async def _check_answers(self) -> None:
        if not await within(self.send({"ping": True}), ANSWER_SECONDS):
            self.end("timeout", "its process no longer answers: a call holds Python's lock")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("an environment did not close: %s", problem)
        self._warned = True


class RemoteEnvironment:
    """An environment in a process, with the interface of Environment."""

    def __init__(self, process: SessionProcess, number: int, context: Context) -> None:
        self.number = number
        self._process, self._context = process, context
        self._running: Future | None = None  # the reply of a call that has not returned
        self._is_closed = False
        self._asked: set[asyncio.Task[None]] = set()

    async def reset(self, row: Example, seed: int) -> Observation:
        context = self._context
        values = {
            "row": asdict(row),
            "seed": seed,
            "max_turns": context.max_turns,
            "chat": asdict(context.chat),
            "tool_timeout": context.tool_timeout,
            "max_observation_tokens": context.max_observation_tokens,
        }
        reply = await self._call({"reset": values})
        return wire.unpack_observation(reply["observation"])

    async def step(self, text: str) -> Step:
        return wire.unpack_step(
            await self._call({"step": text, "shown_sizes": self._context.shown_sizes})
        )

    async def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._running = self._process.send({**request, "session": self.number})
        try:
            reply = await self._running
        except CallFailure:  # it has ended, and leaves its process free for other sessions
            self._running = None
            raise
        self._running = None
        return reply

    def close(self) -> None:
        """Begin to close it, also amid a call."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._asked:
            task.cancel()
        self._process.close(self, gave_up=self._running is not None)

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer a request for a score. An error of context.score is raised by the running call."""
        task = asyncio.create_task(self._score(message))
        self._asked.add(task)
        task.add_done_callback(self._scored)

    async def _score(self, message: Mapping[str, Any]) -> None:
        score = await self._context.score(message["text"], wire.unpack_row(message["row"]))
        self._process.tell(
            {"session": self.number, "scored": message["ask"], "score": asdict(score)}
        )

    def _scored(self, task: "asyncio.Task[None]") -> None:
        self._asked.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._running is not None and not self._running.done():
            self._running.set_exception(error)


class _Control(asyncio.Protocol):
    """Messages of a process."""

    def __init__(self, process: SessionProcess) -> None:
        self._process = process

    def data_received(self, data: bytes) -> None:
        self._process.receive(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._process.lose()


class _Output(asyncio.Protocol):
    """What a process prints. tail: Its last bytes."""

    tail = b""

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-KEPT_OUTPUT:]


async def within(reply: Future, seconds: float) -> bool:
    """Wait for a reply, and return False if there is none in time. While the loop stands still, as
    between two rollouts, time does not count.
    """
    tick = min(seconds, TICK)
    for _ in range(math.ceil(seconds / tick)):
        if (await asyncio.wait([reply], timeout=tick))[0]:
            return True
    return False

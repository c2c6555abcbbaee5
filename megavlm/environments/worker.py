"""Process that runs environments of a user's class: `python -m megavlm.environments.worker
CONTROL_FD`, with the limits and the messages of megavlm/subprocess_pool.

Each session has a thread and an event loop of its own, from its reset to its close. A call that
blocks therefore holds up no other session, and what belongs to a loop or a thread can be kept
between two calls. The main thread only hands out messages.
"""

import asyncio
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from megavlm.environments import registry, wire
from megavlm.environments.base import ChatFormat, Context, Environment
from megavlm.environments.tools.load import OpenTools, Toolbox, load_tools
from megavlm.environments.tools.tool import marked_names
from megavlm.process import allow_open_files
from megavlm.rewards.base import Example, Score
from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.limits import has_children, limit
from megavlm.subprocess_pool.wire import frame, receive

STACK_BYTES = 2**20  # of a thread; the memory limit counts it whether it is used or not


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    limit(setup["memory_bytes"], setup["parent"])
    allow_open_files()
    threading.stack_size(STACK_BYTES)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    options = setup["options"]
    # The user's module and class may raise anything. An error ends the process, which reports the
    # reason.
    sys.excepthook = lambda kind, error, _: control.sendall(
        frame({"id": setup["id"], "error": str(error)})
    )
    cls = registry.load_environment(setup["name"], options, setup["tools"])
    tools = load_tools(setup["tools"], own=marked_names(cls))
    check(cls, setup["max_turns"], options)
    sys.excepthook = sys.__excepthook__
    control.sendall(frame({"id": setup["id"]}))
    Worker(control, cls, options, tools).serve()


def check(cls: type[Environment], max_turns: int, options: Mapping[str, Any]) -> None:
    """Call the check of a class, if it has one, on an instance that plays no episode."""
    if hasattr(cls, "check"):
        environment: Any = registry.make(cls, Context(_unscored, max_turns), options)
        asyncio.run(_check(environment))


async def _check(environment: Any) -> None:
    try:
        await environment.check()
    finally:
        await registry.close(environment)


async def _unscored(text: str, row: Example) -> Score:
    raise ValueError("there is no response to score before an episode")


@dataclass(eq=False)
class Worker:
    """The sessions of a process. lock: Held where sessions are added, found and removed."""

    control: socket.socket
    cls: type[Environment]
    options: Mapping[str, Any]
    tools: Toolbox
    sessions: dict[int, "Session"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sending: threading.Lock = field(default_factory=threading.Lock)

    def serve(self) -> None:
        """Hand each message to its session, until the trainer is gone."""
        while (message := receive(self.control)) is not None:
            if "ping" in message:
                self.send({"id": message["id"]})
                continue
            with self.lock:
                if "reset" in message:
                    self._open(message["session"])
                if session := self.sessions.get(message["session"]):
                    session.put(message)
            if session is None:
                self.answer_for_ended(message)

    def _open(self, number: int) -> None:
        self.sessions[number] = session = Session(self, number)
        session.start()

    def answer_for_ended(self, message: Mapping[str, Any]) -> None:
        if "close" in message:
            self.send({"id": message["id"], "left_children": self.left_children()})
        elif "step" in message:
            ended = {"failure": "exception", "message": "an earlier error ended it"}
            self.send({"id": message["id"], **ended})

    def send(self, message: Mapping[str, Any]) -> None:
        with self.sending:
            self.control.sendall(frame(message))

    def left_children(self) -> bool:
        """Return True if all sessions have ended, but a process that they started still runs."""
        with self.lock:
            return not self.sessions and has_children()


class Session:
    """An environment in a thread and an event loop of its own."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker, self._number = worker, number
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._environment: Environment | None = None
        self._context: Context | None = None
        self._tools: OpenTools | None = None
        self._call: asyncio.Task[None] | None = None
        self._request: int | None = None  # id of the call that runs
        self._close_request: int | None = None
        self._closing = asyncio.Event()
        self._has_ended = False
        self._asks = count()
        self._scores: dict[int, asyncio.Future[Score]] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, message: Mapping[str, Any]) -> None:
        """Take a message from the main thread."""
        self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "scored" in message:
            score = self._scores.pop(message["scored"])
            if not score.done():  # it may have been cancelled
                score.set_result(Score(**message["score"]))
        elif "close" in message:
            self._close_request = message["id"]
            self._closing.set()
            if self._call is not None:
                self._call.cancel()
        elif self._has_ended:
            self._worker.answer_for_ended(message)
        else:
            self._request = message["id"]
            self._call = self._loop.create_task(self._answer(message))

    def _run(self) -> None:
        problem: dict[str, Any] = {}
        with self._runner:
            # A task of the user's may raise SystemExit, which ends the loop's run.
            if failure := self._guarded(self._serve()):
                self._reply(failure)
            self._has_ended = True
            if failure := self._guarded(self._close()):
                problem = {"error": failure["message"]}
            with self._worker.lock:
                del self._worker.sessions[self._number]
            self._runner.run(asyncio.sleep(0))  # takes the messages that came before
        if self._close_request is not None:
            left = {"left_children": self._worker.left_children()}
            self._worker.send({"id": self._close_request, **left, **problem})

    def _guarded(self, work: Any) -> dict[str, Any] | None:
        try:
            self._runner.run(work)
        except BaseException as error:
            return failed(error)
        return None

    async def _serve(self) -> None:
        """Block until the session is to be closed."""
        await self._closing.wait()
        if self._call is not None:
            await asyncio.wait([self._call])

    async def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            self._reply(await self._play(message))
        # The user's code may raise anything, including SystemExit, and return what cannot be sent.
        except BaseException as error:
            self._reply(failed(error))

    async def _play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if "step" in message:
            assert self._environment is not None and self._context is not None
            self._context.shown_sizes.clear()
            sizes = message["shown_sizes"].items()
            self._context.shown_sizes.update((key, tuple(size)) for key, size in sizes)
            return wire.pack_step(await self._environment.step(message["step"]))
        values = message["reset"]
        self._tools = self._worker.tools.open()
        self._context = Context(
            self._score,
            values["max_turns"],
            ChatFormat(**values["chat"]),
            self._tools.tools,
            values["tool_timeout"],
            values["max_observation_tokens"],
        )
        self._environment = registry.make(self._worker.cls, self._context, self._worker.options)
        seen = await self._environment.reset(wire.unpack_row(values["row"]), values["seed"])
        return {"observation": wire.pack_observation(seen)}

    def _reply(self, reply: Mapping[str, Any]) -> None:
        if self._request is not None:
            self._worker.send({"id": self._request, **reply})
        self._request = None

    async def _close(self) -> None:
        try:
            if self._environment is not None:
                await registry.close(self._environment)
        finally:
            if self._tools is not None:
                await self._tools.close()

    async def _score(self, text: str, row: Example) -> Score:
        number = next(self._asks)
        score: asyncio.Future[Score] = self._loop.create_future()
        self._scores[number] = score
        self._worker.send(
            {"session": self._number, "ask": number, "text": text, "row": asdict(row)}
        )
        return await score


def failed(error: BaseException) -> dict[str, Any]:
    """Return the failure of a call that raised `error`."""
    if isinstance(error, MemoryError):
        return {"failure": "memory", "message": "out of memory"}
    if isinstance(error, CallFailure):
        return {"failure": error.kind, "message": error.message}
    return {"failure": "exception", "message": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()

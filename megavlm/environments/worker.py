"""Process that runs environments of a user's class: `python -m megavlm.environments.worker
CONTROL_FD`, with the limits and the protocol of megavlm/limited.

The process keeps no state between two requests: an environment is sent to the trainer as a pickle,
and comes back with the next response. Killing a process therefore affects no other episode. Only
these processes unpickle environments, and only they pickle them.
"""

import asyncio
import base64
import pickle
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megavlm.environments import registry, wire
from megavlm.environments.base import Context, Environment
from megavlm.limited.limits import has_children, limit, limit_cpu
from megavlm.limited.wire import frame, receive
from megavlm.rewards.base import Example, Score


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    limit(setup["memory_bytes"], setup["parent"])
    options = setup["options"]
    # The import of the user's module may raise anything. An error ends the process, which reports
    # the reason.
    sys.excepthook = lambda kind, error, _: control.sendall(frame({"error": str(error)}))
    cls = registry.load_environment(setup["name"], options)
    sys.excepthook = sys.__excepthook__
    control.sendall(frame({}))
    while (request := receive(control)) is not None:
        limit_cpu(request["cpu_seconds"])
        reply = run_environment(cls, options, request, control)
        sys.stdout.flush()
        control.sendall(frame(reply | {"left_children": has_children()}))


def run_environment(
    cls: type[Environment],
    options: Mapping[str, Any],
    request: Mapping[str, Any],
    control: socket.socket,
) -> dict[str, Any]:
    try:
        return asyncio.run(_answer(cls, options, request, control))
    except MemoryError:
        return {"failure": "memory", "message": "out of memory"}
    # The user's code may raise anything, including SystemExit.
    except BaseException as error:
        return {"failure": "exception", "message": f"{type(error).__name__}: {error}"[:500]}


async def _answer(
    cls: type[Environment],
    options: Mapping[str, Any],
    request: Mapping[str, Any],
    control: socket.socket,
) -> dict[str, Any]:
    reward_manager = RemoteScorer(control)
    if "row" in request:
        context = Context(Asking(), request["max_turns"])
        environment = registry.make(cls, context, options)
    else:
        # The pickle was made by this process or one like it: code that could forge it runs here
        # anyway.
        environment = pickle.loads(base64.b64decode(request["environment"]))  # noqa: S301
    Asking.reward_manager = reward_manager
    asyncio.get_running_loop().add_reader(control, reward_manager.receive)
    try:
        if "row" in request:
            row = wire.unpack_row(request["row"])
            shown = await environment.reset(row, request["seed"])
            reply = {"observation": wire.pack_observation(shown)}
        else:
            reply = wire.pack_step(await environment.step(request["text"]))
        await reward_manager.silence()
    finally:
        asyncio.get_running_loop().remove_reader(control)
    return reply if reply.get("done") else reply | {"environment": _pickled(environment)}


class Asking:
    """Picklable form of Context.score."""

    reward_manager: "RemoteScorer"

    async def __call__(self, text: str, row: Example) -> Score:
        return await self.reward_manager.score(text, row)


@dataclass
class RemoteScorer:
    """Sends all open requests for scores to the trainer in one message, and receives the scores."""

    control: socket.socket
    waiting: list[tuple[str, Example, "asyncio.Future[Score]"]] = field(default_factory=list)
    asked: list["asyncio.Future[Score]"] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, text: str, row: Example) -> Score:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()
        self.waiting.append((text, row, future))
        loop.call_soon(self._ask)  # later, so that concurrent calls share one message
        return await future

    def _ask(self) -> None:
        if self.waiting and not self.asked:  # the socket carries one message at a time
            questions = [[text, wire.pack_row(row)] for text, row, _ in self.waiting]
            self.asked = [future for _, _, future in self.waiting]
            self.waiting.clear()
            self.control.sendall(frame({"ask": questions}))

    def receive(self) -> None:
        reply = receive(self.control)
        if reply is None:  # the trainer is gone
            sys.exit()
        limit_cpu(reply["cpu_seconds"])
        for future, score in zip(self.asked, reply["scores"], strict=True):
            if not future.done():  # it may have been cancelled
                future.set_result(Score(**score))
        self.asked = []
        self.heard.set()
        self._ask()

    async def silence(self) -> None:
        """Block until it is this process's turn to send."""
        while self.asked:  # the futures themselves may have been cancelled
            self.heard.clear()
            await self.heard.wait()


def _pickled(environment: Environment) -> str:
    try:
        return base64.b64encode(pickle.dumps(environment)).decode()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"it cannot be pickled between its turns ({error})") from error


if __name__ == "__main__":
    main()

"""A user's environment that holds what cannot be pickled, and does what its row's answer says."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

from PIL import Image as Picture

from megavlm.environments.base import Context, Observation, Step
from megavlm.environments.tools.environment import ToolEnvironment
from megavlm.environments.tools.tool import tool
from megavlm.rewards.base import Example

TOGETHER = threading.Barrier(32)
SINK: list[bytearray] = []
AGAIN = Observation([{"role": "user", "content": "?"}])


class Keeping:
    """log: File that gets a line for each reset and each close."""

    def __init__(self, context: Context, log: str = "", on_close: str = "") -> None:
        self.context, self.log, self.on_close = context, log, on_close
        self.name = uuid.uuid4()

    async def reset(self, row: Example, seed: int) -> Observation:
        self.row = row
        self.write("opened")
        self.numbers = (10 * number for number in range(1, 9))  # a generator
        self.ours, self.theirs = socket.socketpair()
        self.lock, self.thread = threading.Lock(), threading.current_thread()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.listening = asyncio.create_task(self.listen())  # goes on between turns
        if row.answer == "no reset":
            raise KeyError("as told")
        return Observation(row.messages)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.theirs.setblocking(False)
        while data := await loop.sock_recv(self.theirs, 99):
            self.heard.put_nowait(data)

    async def step(self, text: str) -> Step:
        match text:
            case "keep":
                assert threading.current_thread() is self.thread
                with self.lock:
                    self.ours.sendall(b"hello")
                    assert await self.heard.get() == b"hello"
                return Step(AGAIN, next(self.numbers), False)
            case "together":  # ends once as many steps are open in this process
                await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0)
                TOGETHER.wait(60)
            case "process":
                return Step(AGAIN, os.getpid(), False)
            case "child":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"])
                return Step(AGAIN, child.pid, False)
            case "1" | "raise":
                raise KeyError("as told")
            case "2" | "hang":
                await asyncio.sleep(1000)
            case "block":
                time.sleep(1000)
            case "hold":
                re.match("(a+)+$", "a" * 60 + "b")  # holds Python's lock
            case "allocate":
                SINK.append(bytearray(4 * 2**30))
            case "die":
                print("what it said last")
                os._exit(3)
            case "exit later":
                self.exiting = asyncio.create_task(self.exit())
                return Step(AGAIN, 0.0, False)
            case "4":
                return Step(AGAIN, 0.0, False)
            case "columns":
                seen = repr((self.row.extra, self.row.images))
                return Step(Observation([{"role": "user", "content": seen}]), 0.0, False)
            case "picture":
                content = ["Look:", Picture.new("RGB", (40, 40))]
                return Step(Observation([{"role": "user", "content": content}]), 0.0, False)
            case "set":
                return Step(Observation([{"role": "user", "content": "", "name": {1}}]), 0.0, False)
            case asked if asked.startswith("score"):
                score = await self.context.score(asked, self.row)
                return Step(AGAIN, score.reward, False)
        return Step(None, 1.0, True)

    async def exit(self) -> None:
        sys.exit("as told")

    async def close(self) -> None:
        assert threading.current_thread() is self.thread
        self.write("closed")
        match self.on_close:
            case "raise":
                raise KeyError("as told")
            case "hang":
                await asyncio.sleep(1000)

    def write(self, word: str) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"{word} {self.name}\n")


class Plain(Keeping):
    def close(self) -> Any:
        self.write("closed")


def where() -> str:
    """Return the process that calls."""
    return str(os.getpid())


def untyped(place) -> str:  # type: ignore[no-untyped-def]
    """Return the place."""
    return str(place)


class Locating(ToolEnvironment):
    @tool
    def where(self) -> int:
        """Return the process of the environment."""
        return os.getpid()

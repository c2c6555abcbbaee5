"""Sessions of adapters in real processes."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from PIL import Image as Picture

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments import processes
from megavlm.environments.base import ChatFormat, Content, Context, Image, Observation
from megavlm.environments.processes import EnvironmentPool
from megavlm.environments.sessions import RemoteEnvironment
from megavlm.inference.server import ClaimedPort
from megavlm.rewards.base import Example, Score
from tests.support.timeouts import scaled

T = TypeVar("T")
USER = Path(__file__).parents[1] / "user"
ROW = Example("Play.", "")


@contextmanager
def user_modules() -> Iterator[None]:
    """Let processes of environments find the modules of `user`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(USER), prepend=os.pathsep)
        yield


async def score(text: str, row: Example) -> Score:
    return Score(float(text == row.answer), text == row.answer)


@asynccontextmanager
async def pool(name: str, **settings: Any) -> AsyncIterator[EnvironmentPool]:
    settings = {"workers": 1, "timeout": scaled(60), "memory_mb": 4096, "max_turns": 9, **settings}
    made = await processes.make_environments(EnvironmentConfig(name=name, **settings))
    assert isinstance(made, EnvironmentPool)
    try:
        yield made
    finally:
        await made.close()


def refused(name: str, problem: str, **settings: Any) -> None:
    """A run with an environment of these settings ends before it starts."""

    async def start() -> None:
        async with pool(name, **settings):
            pass

    with pytest.raises(ValueError, match=problem):
        asyncio.run(start())


Play = Callable[[RemoteEnvironment, Observation], Awaitable[T]]


def play(
    name: str,
    steps: Play[T],
    row: Example = ROW,
    seed: int = 0,
    chat: Any = "json",
    **settings: Any,
) -> T:
    """Play an episode in a process, and return the result of `steps`."""

    async def work() -> T:
        async with pool(name, **settings) as made:
            session = await opened(made, chat)
            return await steps(session, await session.reset(row, seed))

    return asyncio.run(work())


async def opened(made: EnvironmentPool, chat: Any = "json", tool_timeout: float = 30) -> Any:
    return await made.make(
        Context(score, made._settings.max_turns, ChatFormat(chat), tool_timeout=tool_timeout)
    )


async def ended(made: EnvironmentPool) -> None:
    """Wait until no session is open, nor any process of a server."""
    async with asyncio.timeout(scaled(60)):
        while any(process.sessions for process in made._processes):
            await asyncio.sleep(0.01)


def children(made: EnvironmentPool) -> list[psutil.Process]:
    """Return the processes that run below those of a pool."""
    pids = [process._process.pid for process in made._processes if process.alive]
    return [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(found: list[psutil.Process]) -> None:
    """Wait until processes have ended."""
    async with asyncio.timeout(scaled(20)):
        while any(map(runs, found)):
            await asyncio.sleep(0.01)


def parts(shown: Observation) -> Content:
    """Return the content of the last message."""
    content: Content = shown.messages[-1]["content"]
    return content


def texts(shown: Observation) -> list[str]:
    return [part for part in parts(shown) if isinstance(part, str)]


def pixels(shown: Observation) -> list[np.ndarray]:
    """Return the images of the last message."""
    images = [part for part in parts(shown) if isinstance(part, Image)]
    return [np.asarray(Picture.open(BytesIO(image.data))) for image in images]


@contextmanager
def serves(command: list[str]) -> Iterator[str]:
    """Start a server, with a free port for {port} in the command, and yield its URL."""
    claim = ClaimedPort()  # it listens seconds later
    port = claim.number
    with subprocess.Popen([part.format(port=port) for part in command]) as server:
        end = time.monotonic() + scaled(60)
        while server.poll() is None and time.monotonic() < end:
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()

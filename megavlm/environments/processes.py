"""Environments in the trainer's process, and environments in processes with limits."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments import registry
from megavlm.environments.base import Context, Environment
from megavlm.environments.sessions import RemoteEnvironment, SessionProcess
from megavlm.subprocess_pool.failure import CallFailure

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # that all open environments have to close at the end of a run


class Local:
    """Built-in environments in the trainer's process, because they need very little time."""

    def __init__(self, cls: type[Environment], options: Mapping[str, Any]) -> None:
        self._class, self._options = cls, options
        self._open: set[Environment] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def make(self, context: Context) -> Environment:
        environment = registry.make(self._class, context, self._options)
        self._open.add(environment)
        return environment

    def end(self, environment: Environment) -> None:
        """Begin to close an environment."""
        self._open.discard(environment)
        task = asyncio.create_task(registry.close(environment))
        self._closing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("an environment did not close: %r", error)

    async def close(self) -> None:
        """Close the environments that are open, within CLOSE_SECONDS."""
        for environment in list(self._open):
            self.end(environment)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)


class EnvironmentPool:
    """Environments in processes with limits, with the interface of Local.

    The processes live as long as the thread that runs the asyncio loop.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        self._processes: list[SessionProcess] = []
        self._numbers = count()

    async def start(self) -> None:
        """Start the first process. Raises ValueError if the class cannot be loaded."""
        await self._process().started

    async def make(self, context: Context) -> RemoteEnvironment:
        """Open a session in the process with the fewest. Raises CallFailure if no process
        starts.
        """
        process = self._process()
        session = RemoteEnvironment(process, next(self._numbers), context)
        with ExitStack() as stack:
            process.sessions[session.number] = session
            stack.callback(process.sessions.pop, session.number, None)
            try:
                await asyncio.shield(process.started)
            except ValueError as error:
                raise CallFailure("crash", str(error)) from error
            stack.pop_all()
        return session

    def end(self, session: RemoteEnvironment) -> None:
        """Begin to close a session."""
        session.close()

    def _process(self) -> SessionProcess:
        """Return the process for the next session. It may be a new one that still starts."""
        self._processes = [process for process in self._processes if process.alive]
        usable = [process for process in self._processes if process.takes_sessions]
        settings = self._settings
        if len(usable) < settings.workers and all(process.sessions for process in usable):
            setup = {
                "name": settings.name,
                "options": settings.options,
                "tools": settings.tools,
                "max_turns": settings.max_turns,
            }
            process = SessionProcess(setup, memory_mb=settings.memory_mb, timeout=settings.timeout)
            self._processes.append(process)
            return process
        return min(usable, key=lambda process: len(process.sessions))

    async def close(self) -> None:
        """Close the sessions that are open, within CLOSE_SECONDS, and end the processes."""
        await asyncio.gather(*(process.close_all(CLOSE_SECONDS) for process in self._processes))


async def make_environments(settings: EnvironmentConfig) -> Local | EnvironmentPool:
    """Load the environment. A class runs in processes, the first of which starts here, unless it is
    built in, declares that it `runs_in_driver`, and calls no tools of a recipe.

    Raises ValueError if it cannot be loaded or does not have the options.
    """
    if registry.find_environment(settings.name).is_built_in and not settings.tools:
        cls = registry.load_environment(settings.name, settings.options)
        if getattr(cls, "runs_in_driver", False):
            return Local(cls, settings.options)
    pool = EnvironmentPool(settings)
    await pool.start()
    return pool

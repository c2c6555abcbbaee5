"""The thread that starts, probes and restarts the servers of a fleet, and owns their processes.

For the kernel a server's parent is the thread that launched it (see server_main.py): this one
lives until
the fleet is left, and ends them.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import ProbeError, Probes, Refused
from megavlm.inference.server_pool.state import Action, Event, Kind, State

if TYPE_CHECKING:
    from megavlm.inference.server_pool.pool import ServerPool

TICK = 0.2  # seconds between looks at a process
PROBE_EVERY = 15.0  # seconds without an answer after which an idle server is asked
ANSWERED = Event(Kind.ANSWERED)


class Supervisor:
    """One task per server, all on one thread's event loop."""

    def __init__(self, server_pool: "ServerPool") -> None:
        self._server_pool = server_pool
        self._thread = threading.Thread(target=self._main, name="rollout-fleet", daemon=True)
        self._closing = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when every process of the fleet has ended."""
        self._closing.set()
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._watch_all())
        except BaseException as error:
            self._server_pool.broke(error)
            raise

    async def _watch_all(self) -> None:
        self._probes = Probes()
        handles = list(self._server_pool.handles.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                for handle in handles:
                    tasks.create_task(self._watch(handle))
        finally:
            servers = [handle.server for handle in handles if handle.server is not None]
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
            await self._probes.close()

    async def _watch(self, handle: ServerHandle) -> None:
        if handle.server is not None:
            await self._launch(handle)
        while not self._closing.is_set():
            await self._look(handle)
            await asyncio.sleep(TICK)

    async def _look(self, handle: ServerHandle) -> None:
        """One look at a server: its process, what time has changed, and a probe if one is due."""
        url, server_pool = handle.url, self._server_pool
        state = server_pool.record(url).state
        if state is State.RETIRED:
            if handle.server is not None and handle.server.running:
                await asyncio.to_thread(handle.server.stop)
            return
        if server_pool.resting and state is State.DEAD:
            return  # its memory is in use
        action = server_pool.tell(url, Event(Kind.TICK))
        if action is Action.START:
            await self._launch(handle)
        elif reason := self._death(handle):
            await self._stop(handle, Event(Kind.EXITED, reason=reason))
        elif probe := self._due(handle):
            await self._run(probe, handle)

    def _due(self, handle: ServerHandle) -> Coroutine[Any, Any, None] | None:
        url, server_pool = handle.url, self._server_pool
        if not server_pool.may_probe(url):
            return None
        match server_pool.record(url).state:
            case State.STARTING:
                return self._first(handle)
            case State.DEAD if handle.server is None:
                return self._first(handle)
            case State.SUSPECT:
                return self._version(handle) if server_pool.resting else self._generate(handle)
            case State.STALE | State.HEALTHY if (
                not server_pool.resting and server_pool.silent_for(url) > PROBE_EVERY
            ):
                return (
                    self._generate(handle) if server_pool.is_generating else self._version(handle)
                )
        return None

    async def _run(self, probe: Coroutine[Any, Any, None], handle: ServerHandle) -> None:
        """The probe to its end, or until the process or the fleet ends first."""
        task = asyncio.create_task(probe)
        while not task.done():
            await asyncio.wait({task}, timeout=TICK)
            if self._closing.is_set() or self._death(handle):
                task.cancel()
                await asyncio.wait({task})
                return
        task.result()

    async def _first(self, handle: ServerHandle) -> None:
        """Whether it is up by now."""
        server_pool, record = self._server_pool, self._server_pool.record(handle.url)
        try:
            # Without pushes from here, a pause is another run's.
            up = await self._probes.is_up(handle, wake=server_pool.policy.needs_refit)
            handle.tensor_parallel, handle.device = up
        except Refused as refusal:
            await self._stop(handle, Event(Kind.START_FAILED, reason=str(refusal)))
            return
        except ProbeError as error:
            if record.state is State.DEAD or server_pool.seconds_in_state(handle.url) < (
                server_pool.start_timeout
            ):
                return
            server = handle.server
            reason = (
                f"{handle.url} did not answer within {server_pool.start_timeout:g} s "
                f"(rollout.start_timeout): {error}"
                if server is None
                else server.with_log(server.too_late)
            )
            await self._stop(handle, Event(Kind.START_FAILED, reason=reason))
            return
        server_pool.tell(handle.url, ANSWERED)

    async def _generate(self, handle: ServerHandle) -> None:
        await self._probe(handle, self._probes.generates(handle))

    async def _version(self, handle: ServerHandle) -> None:
        """Tells a server that was replaced behind our back, too."""
        server_pool, expected = self._server_pool, self._server_pool.record(handle.url).version
        version = await self._probe(handle, self._probes.weight_version(handle))
        if version is not None and expected and version != expected:
            reason = f"its weights are version {version!r} instead of {expected!r}"
            server_pool.wrong_version(handle.url, reason)

    async def _probe(self, handle: ServerHandle, question: Coroutine[Any, Any, Any]) -> Any:
        try:
            answer = await question
        except ProbeError as error:
            reason = str(error)
            if handle.server is not None:
                reason = handle.server.with_log(f"{handle.url}{reason}")
            await self._stop(handle, Event(Kind.PROBE_FAILED, reason=reason))
            return None
        self._server_pool.tell(handle.url, ANSWERED)
        return answer

    def _death(self, handle: ServerHandle) -> str | None:
        server = handle.server
        return server.death() if server is not None and server.running else None

    async def _launch(self, handle: ServerHandle) -> None:
        assert handle.server is not None
        try:
            handle.server.launch()  # on this thread, which lives as long as the server
        except RolloutServerError as error:
            await self._stop(handle, Event(Kind.START_FAILED, reason=str(error)))

    async def _stop(self, handle: ServerHandle, event: Event) -> None:
        """Tells the event, and ends the processes where that is its consequence."""
        if self._server_pool.tell(handle.url, event) is Action.STOP and handle.server is not None:
            await asyncio.to_thread(handle.server.stop)

"""Supervisor of a pool's servers: one thread that starts, probes, restarts and ends them.

To the kernel, the parent of a server is the thread that launched it (see server_main.py). So this
thread must live as long as the servers: it runs until the pool is left, and then ends them.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.catch_up import CatchUp
from megavlm.inference.server_pool.changes import Change, asked_changes
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import ProbeError, Probes, Refused, Unreachable
from megavlm.inference.server_pool.state import GONE, LEFT, Action, Event, EventKind, State
from megavlm.inference.server_pool.status import write_states
from megavlm.inference.server_pool.work import WorkReading, read_work

TICK = 0.2  # seconds between checks of a server's process
PROBE_EVERY = 15.0  # seconds without an answer after which a server is probed
DRAIN_SECONDS = 1.0  # without requests, after which a server has left
CHANGES_EVERY = 1.0  # seconds between looks for changes of servers
LOOK_EVERY = 30.0  # seconds between probes of an external server that is away


class Supervisor:
    """Watches each server in its own task, all on one thread's event loop."""

    def __init__(
        self,
        records: CatchUp,
        states_file: Path | None,
        joining: Callable[[str], ServerHandle] | None = None,
    ) -> None:
        """states_file: File to which the servers' states are written for `megavlm watch`, and
        as text for Prometheus beside it. joining: See ServerPool.
        """
        self._records, self._states_file, self._joining = records, states_file, joining
        self._thread = threading.Thread(target=self._main, name="server-pool", daemon=True)
        self._closing = threading.Event()
        self._looked: dict[str, float] = {}  # time of the last probe of a server that is away
        self._work: dict[str, WorkReading] = {}  # last reading of each server
        self._empty: dict[str, float] = {}  # time since when a leaving server has no requests

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Block until every process of the pool has ended."""
        self._closing.set()
        self._thread.join()

    def _main(self) -> None:
        with ExitStack() as stack:
            stack.push(self._report)
            asyncio.run(self._watch_all())

    def _report(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # of one of the tasks
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            self._records.supervisor_failed(first)

    async def _watch_all(self) -> None:
        self._probes = Probes()
        status = None
        if self._states_file is not None:
            writing = write_states(self._records, self._probes, self._states_file)
            status = asyncio.create_task(writing)
        try:
            async with asyncio.TaskGroup() as tasks:
                for handle in self._records.handles.values():
                    tasks.create_task(self._watch(handle))
                if self._joining is not None:
                    await self._make_changes(tasks, self._joining)
        finally:
            if status is not None:
                status.cancel()
                await asyncio.wait({status})
            handles = self._records.handles.values()
            servers = [handle.server for handle in handles if handle.server is not None]
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
            await self._probes.close()

    async def _make_changes(
        self, tasks: asyncio.TaskGroup, joining: Callable[[str], ServerHandle]
    ) -> None:
        """Make the changes of servers that the user asks for, until the pool is left."""
        records, due = self._records, 0.0
        assert self._states_file is not None
        while not self._closing.is_set():
            await asyncio.sleep(TICK)
            if time.monotonic() < due:
                continue
            due = time.monotonic() + CHANGES_EVERY
            changes: dict[str, Change] = {}
            with suppress(OSError):  # the file system may be away for a while
                changes = await asyncio.to_thread(asked_changes, self._states_file.parent)
            for url, change in changes.items():
                is_known = url in records.handles
                has_left = is_known and records.record(url).state in LEFT
                if change == "add" and (not is_known or has_left):
                    records.add(handle := joining(url))
                    if not is_known:  # the task of one that has left goes on
                        tasks.create_task(self._watch(handle))
                elif change == "remove" and is_known and not has_left:
                    records.remove(url)
            records.start_catching_up()

    async def _watch(self, handle: ServerHandle) -> None:
        if handle.server is not None:
            await self._launch(handle)
        url = handle.url
        while not self._closing.is_set():
            await self._check(self._records.handles[url])
            await asyncio.sleep(TICK)

    async def _check(self, handle: ServerHandle) -> None:
        """Check a server once: its process, timeouts, and a probe if one is due."""
        url, records = handle.url, self._records
        state = records.record(url).state
        if handle.server is not None and handle.server.running:
            await asyncio.to_thread(handle.server.rotate_log)
        if state is State.RETIRED:
            if handle.server is not None and handle.server.running:
                await asyncio.to_thread(handle.server.stop)
            return
        if state in LEFT:
            if state is State.LEAVING and records.may_probe(url):  # no push is on its way to it
                await self._run(self._drain(handle), handle)
            return
        if records.resting and state is State.DEAD:
            return  # its GPU memory is in use by the trainer
        if records.is_starting and state is State.DEAD and handle.server is not None:
            return  # wait_for_starts ends the run: a restart would not help
        action = records.apply(url, Event(EventKind.TICK))
        if action is Action.START:
            await self._launch(handle)
        elif reason := self._death(handle):
            await self._apply(handle, Event(EventKind.EXITED, reason=reason))
        elif probe := self._due_probe(handle):
            await self._run(probe, handle)
        elif self._is_work_due(handle):
            await self._run(self._see_work(handle), handle)

    def _due_probe(self, handle: ServerHandle) -> Coroutine[Any, Any, None] | None:
        url, records = handle.url, self._records
        if not records.may_probe(url):
            return None
        match records.record(url).state:
            case State.STARTING:
                return self._probe_start(handle)
            case State.DEAD if handle.server is None:
                return self._probe_start(handle)
            case State.AWAY if time.monotonic() - self._looked.get(url, 0.0) > LOOK_EVERY:
                self._looked[url] = time.monotonic()
                return self._probe_start(handle)
            case State.SUSPECT if records.resting:
                return self._probe_version(handle)
            case State.SUSPECT:
                return self._probe_generation(handle)
            case State.STALE | State.HEALTHY if (
                not records.resting and records.seconds_since_answer(url) > PROBE_EVERY
            ):
                if records.is_generating:
                    return self._probe_generation(handle)
                return self._probe_version(handle)
        return None

    def _is_work_due(self, handle: ServerHandle) -> bool:
        records, last = self._records, self._work.get(handle.url)
        fit = records.record(handle.url).state in (State.HEALTHY, State.SUSPECT)
        due = last is None or time.monotonic() - last.time > PROBE_EVERY
        return fit and due and records.is_generating

    async def _see_work(self, handle: ServerHandle) -> None:
        """Record if the server has worked since the last check, because a long answer is progress,
        too.
        """
        now, last = await read_work(handle, self._probes), self._work.get(handle.url)
        self._work[handle.url] = now
        if last is not None and now.shows_work(last) and now.has_requests:
            self._records.apply(handle.url, Event(EventKind.WORKED))

    async def _drain(self, handle: ServerHandle) -> None:
        """Let a server leave that has no requests any more, or has not answered for
        `health_check_timeout`: its requests then go to others.
        """
        url, policy = handle.url, self._records.policy
        if policy.abort_leaving:  # each time, as a server does not abort what it has not started
            await self._probes.abort(handle)
        try:
            if any(await self._probes.queue(handle)):
                self._empty.pop(url, None)
                return
            # Its last answers, or requests to it, may still be on their way.
            since = self._empty.setdefault(url, time.monotonic())
            if time.monotonic() - since < DRAIN_SECONDS:
                return
        except Unreachable:
            pass
        except ProbeError:
            if self._records.seconds_in_state(url) < policy.health_check_timeout:
                return
        self._empty.pop(url, None)
        self._records.apply(url, Event(EventKind.DRAINED))

    async def _run(self, probe: Coroutine[Any, Any, None], handle: ServerHandle) -> None:
        """Run a probe to its end, or until the server's process or the pool ends."""
        task = asyncio.create_task(probe)
        while not task.done():
            await asyncio.wait({task}, timeout=TICK)
            if self._closing.is_set() or self._death(handle):
                task.cancel()
                await asyncio.wait({task})
                return
        task.result()

    async def _probe_start(self, handle: ServerHandle) -> None:
        policy, state = self._records.policy, self._records.record(handle.url).state
        try:
            # A run without pushes must not resume a server that another run has paused.
            await self._probes.check_started(handle, resume=policy.needs_refit)
        except Refused as refusal:
            await self._apply(handle, Event(EventKind.START_FAILED, reason=str(refusal)))
            return
        except ProbeError as error:
            seconds = self._records.seconds_in_state(handle.url)
            if state in GONE or seconds < policy.start_timeout:
                return
            server = handle.server
            reason = (
                f"{handle.url} did not answer within {policy.start_timeout:g} s "
                f"(rollout.start_timeout): {error}"
                if server is None
                else server.with_log(server.too_late)
            )
            await self._apply(handle, Event(EventKind.START_FAILED, reason=reason))
            return
        self._records.apply(handle.url, Event(EventKind.ANSWERED))

    async def _probe_generation(self, handle: ServerHandle) -> None:
        await self._probe(handle, self._probes.check_generation)

    async def _probe_version(self, handle: ServerHandle) -> None:
        """Probe the weight version. This also detects a server that was replaced by another
        process.
        """
        expected = self._records.record(handle.url).version
        version = await self._probe(handle, self._probes.weight_version)
        if version is not None and expected and version != expected:
            reason = f"its weights are version {version!r} instead of {expected!r}"
            self._records.apply(handle.url, Event(EventKind.WRONG_VERSION, reason=reason))

    async def _probe(
        self, handle: ServerHandle, probe: Callable[[ServerHandle], Awaitable[Any]]
    ) -> Any:
        before = await read_work(handle, self._probes)
        try:
            result = await probe(handle)
        except ProbeError as error:
            kind = EventKind.PROBE_FAILED
            if isinstance(error, Unreachable):
                kind = EventKind.UNREACHABLE
            elif (await read_work(handle, self._probes)).shows_work(before):
                kind = EventKind.BUSY
            reason = f"{handle.url}{error}"
            if handle.server is not None and kind is not EventKind.BUSY:
                reason = handle.server.with_log(reason)
            await self._apply(handle, Event(kind, reason=reason))
            return None
        self._records.apply(handle.url, Event(EventKind.ANSWERED))
        return result

    def _death(self, handle: ServerHandle) -> str | None:
        server = handle.server
        return server.death() if server is not None and server.running else None

    async def _launch(self, handle: ServerHandle) -> None:
        assert handle.server is not None
        try:
            handle.server.launch()  # on this thread, which lives as long as the server
        except RolloutServerError as error:
            await self._apply(handle, Event(EventKind.START_FAILED, reason=str(error)))

    async def _apply(self, handle: ServerHandle, event: Event) -> None:
        """Apply an event, and end the server's processes if the resulting action is STOP."""
        action = self._records.apply(handle.url, event)
        if action is Action.STOP and handle.server is not None:
            await asyncio.to_thread(handle.server.stop)

"""The thread that starts, probes and restarts the servers of a fleet, and owns their processes.

For the kernel a server's parent is the thread that launched it (see serve.py): this one lives until
the fleet is left, and ends them.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from megavlm.rollout.errors import RolloutServerError
from megavlm.rollout.fleet.member import Member
from megavlm.rollout.fleet.probes import ProbeError, Probes, Refused
from megavlm.rollout.fleet.state import Action, Event, Kind, State

if TYPE_CHECKING:
    from megavlm.rollout.fleet.fleet import Fleet

TICK = 0.2  # seconds between looks at a process
PROBE_EVERY = 15.0  # seconds without an answer after which an idle server is asked
ANSWERED = Event(Kind.ANSWERED)


class Supervisor:
    """One task per server, all on one thread's event loop."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
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
            self._fleet.broke(error)
            raise

    async def _watch_all(self) -> None:
        self._probes = Probes()
        members = list(self._fleet.members.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(self._watch(member))
        finally:
            servers = [member.server for member in members if member.server is not None]
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
            await self._probes.close()

    async def _watch(self, member: Member) -> None:
        if member.server is not None:
            await self._launch(member)
        while not self._closing.is_set():
            await self._look(member)
            await asyncio.sleep(TICK)

    async def _look(self, member: Member) -> None:
        """One look at a server: its process, what time has changed, and a probe if one is due."""
        url, fleet = member.url, self._fleet
        state = fleet.record(url).state
        if state is State.RETIRED:
            if member.server is not None and member.server.running:
                await asyncio.to_thread(member.server.stop)
            return
        if fleet.resting and state is State.DEAD:
            return  # its memory is in use
        action = fleet.tell(url, Event(Kind.TICK))
        if action is Action.START:
            await self._launch(member)
        elif reason := self._death(member):
            await self._stop(member, Event(Kind.EXITED, reason=reason))
        elif probe := self._due(member):
            await self._run(probe, member)

    def _due(self, member: Member) -> Coroutine[Any, Any, None] | None:
        url, fleet = member.url, self._fleet
        if not fleet.may_probe(url):
            return None
        match fleet.record(url).state:
            case State.STARTING:
                return self._first(member)
            case State.DEAD if member.server is None:
                return self._first(member)
            case State.SUSPECT:
                return self._version(member) if fleet.resting else self._generate(member)
            case State.STALE | State.HEALTHY if (
                not fleet.resting and fleet.silent_for(url) > PROBE_EVERY
            ):
                return self._generate(member) if fleet.is_generating else self._version(member)
        return None

    async def _run(self, probe: Coroutine[Any, Any, None], member: Member) -> None:
        """The probe to its end, or until the process or the fleet ends first."""
        task = asyncio.create_task(probe)
        while not task.done():
            await asyncio.wait({task}, timeout=TICK)
            if self._closing.is_set() or self._death(member):
                task.cancel()
                await asyncio.wait({task})
                return
        task.result()

    async def _first(self, member: Member) -> None:
        """Whether it is up by now."""
        fleet, record = self._fleet, self._fleet.record(member.url)
        try:
            # Without pushes from here, a pause is another run's.
            up = await self._probes.is_up(member, wake=fleet.policy.needs_refit)
            member.tensor_parallel, member.device = up
        except Refused as refusal:
            await self._stop(member, Event(Kind.START_FAILED, reason=str(refusal)))
            return
        except ProbeError as error:
            if record.state is State.DEAD or fleet.seconds_in_state(member.url) < (
                fleet.start_timeout
            ):
                return
            server = member.server
            reason = (
                f"{member.url} did not answer within {fleet.start_timeout:g} s "
                f"(rollout.start_timeout): {error}"
                if server is None
                else server.with_log(server.too_late)
            )
            await self._stop(member, Event(Kind.START_FAILED, reason=reason))
            return
        fleet.tell(member.url, ANSWERED)

    async def _generate(self, member: Member) -> None:
        await self._probe(member, self._probes.generates(member))

    async def _version(self, member: Member) -> None:
        """Tells a server that was replaced behind our back, too."""
        fleet, expected = self._fleet, self._fleet.record(member.url).version
        version = await self._probe(member, self._probes.weight_version(member))
        if version is not None and expected and version != expected:
            reason = f"its weights are version {version!r} instead of {expected!r}"
            fleet.wrong_version(member.url, reason)

    async def _probe(self, member: Member, question: Coroutine[Any, Any, Any]) -> Any:
        try:
            answer = await question
        except ProbeError as error:
            reason = str(error)
            if member.server is not None:
                reason = member.server.with_log(f"{member.url}{reason}")
            await self._stop(member, Event(Kind.PROBE_FAILED, reason=reason))
            return None
        self._fleet.tell(member.url, ANSWERED)
        return answer

    def _death(self, member: Member) -> str | None:
        server = member.server
        return server.death() if server is not None and server.running else None

    async def _launch(self, member: Member) -> None:
        assert member.server is not None
        try:
            member.server.launch()  # on this thread, which lives as long as the server
        except RolloutServerError as error:
            await self._stop(member, Event(Kind.START_FAILED, reason=str(error)))

    async def _stop(self, member: Member, event: Event) -> None:
        """Tells the event, and ends the processes where that is its consequence."""
        if self._fleet.tell(member.url, event) is Action.STOP and member.server is not None:
            await asyncio.to_thread(member.server.stop)

"""The rollout servers of a run: who may get requests, who needs weights, and when to give up.

A fleet implements Targets (for weight pushes) and Routing (for the client). Its records change by
events of three kinds of callers: the client, a push, and the supervisor, which owns the processes.
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.routing import Address, Outlook
from megavlm.inference.server_pool.state import (
    Action,
    Event,
    Kind,
    Policy,
    Record,
    State,
    transition,
)
from megavlm.inference.server_pool.supervisor import Supervisor
from megavlm.inference.server_pool.targets import Target


class ServerPool:
    """A context: entering starts the servers, in parallel, and returns when all of them answer;
    leaving stops what was started. RolloutServerError when one does not start.

    min_servers: the fewest that a run goes on with. say: told in a line what happens to servers.
    Every method may be called from any thread.
    """

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        *,
        policy: Policy,
        min_servers: int = 1,
        start_timeout: float = 300.0,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handles = {handle.url: handle for handle in handles}
        self.policy, self.start_timeout = policy, start_timeout
        self.min_servers = min_servers
        self._say, self._clock = say, clock
        now = clock()
        self._records = {
            handle.url: Record(managed=handle.server is not None, since=now) for handle in handles
        }
        self._last_answer = dict.fromkeys(self.handles, now)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listeners: list[Callable[[], object]] = []
        self._pushing: set[str] = set()
        self._users = 0
        self._is_starting = True
        self._broken: BaseException | None = None
        self._setbacks = 0
        self.resting = False  # memory is released: no probe, no restart
        self._supervisor = Supervisor(self)

    def __enter__(self) -> "ServerPool":
        self._supervisor.start()
        try:
            with self._changed:
                while self._must_wait_for_starts():
                    self._changed.wait(1.0)
                self._is_starting = False
        except BaseException:  # KeyboardInterrupt too: nothing may stay behind
            self._supervisor.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._supervisor.close()

    def record(self, url: str) -> Record:
        with self._lock:
            return self._records[url]

    def tell(self, url: str, event: Event) -> Action:
        """An event to a server's record; what its supervisor must do then."""
        with self._lock:
            now = self._clock()
            before = self._records[url]
            after, action = transition(before, event, now, self.policy)
            self._records[url] = after
            if event.kind is Kind.ANSWERED:
                self._last_answer[url] = now
            if after.state is not before.state:
                self._setbacks += after.state in (State.DEAD, State.RETIRED)
                self._report(url, before, after)
                self._wake()
            return action

    def seconds_in_state(self, url: str) -> float:
        with self._lock:
            return self._clock() - self._records[url].since

    def silent_for(self, url: str) -> float:
        """Seconds since it last answered anything."""
        with self._lock:
            return self._clock() - self._last_answer[url]

    def may_probe(self, url: str) -> bool:
        """Not while weights are on their way to it."""
        with self._lock:
            return url not in self._pushing

    @property
    def is_generating(self) -> bool:
        with self._lock:
            return self._users > 0

    # Targets: what a push needs

    def targets(self, without: Container[str] = ()) -> list[Target]:
        with self._lock:
            self._check()
            targets = [target for target in self.answering() if target.url not in without]
            self._pushing = {target.url for target in targets}
            return targets

    def answering(self) -> list[Target]:
        """Healthy and stale servers."""
        with self._lock:
            states = {url: record.state for url, record in self._records.items()}
            fit = (State.HEALTHY, State.STALE)
            return [self._target(m) for url, m in self.handles.items() if states[url] in fit]

    def wait_for_targets(self) -> int:
        """Returns when there is one: where all have died, that takes a restart. A count for
        `failed_since`.
        """
        with self._changed:
            while not self.answering():
                self._check()
                self._changed.wait(1.0)
            return self._setbacks

    def wait_while(self, *states: State) -> None:
        """Until no server is in one of them: STARTING and SUSPECT pass by themselves."""
        with self._changed:
            while any(record.state in states for record in self._records.values()):
                self._check()
                self._changed.wait(1.0)

    def failed_since(self, count: int) -> bool:
        """Whether a server has died or failed a push since, and so another push may do better: a
        server that fails time and again is given up in the end.
        """
        with self._lock:
            self._check()
            return self._setbacks > count

    def refitted(self, url: str, version: str) -> None:
        with self._lock:
            self._pushing.discard(url)
            self._last_answer[url] = self._clock()
            self.tell(url, Event(Kind.REFITTED, version=version))
            for other, record in self._records.items():  # who missed the push
                if other not in self._pushing and record.version not in (None, version):
                    self.tell(other, Event(Kind.WRONG_VERSION, reason=f"missed {version}"))

    def failed(self, url: str, reason: str) -> None:
        self._missed(url, Event(Kind.SYNC_FAILED, reason=reason))

    def mismatched(self, url: str, reason: str) -> None:
        self._missed(url, Event(Kind.MISMATCH, reason=reason))

    def _missed(self, url: str, event: Event) -> None:
        with self._lock:
            self._pushing.discard(url)
            self._setbacks += 1
            self._say(f"rollout server {url} missed a push: {event.reason}")
            self.tell(url, event)
            self._check()

    # Routing: what the client needs

    def routable(self, version: str | None) -> list[Address]:
        with self._lock:
            self._check()
            return [
                Address(handle.url, handle.api_key, handle.admin_key)
                for url, handle in self.handles.items()
                if self._records[url].routable(version)
            ]

    def outlook(self, version: str | None) -> Outlook:
        with self._lock:
            self._check()
            records = list(self._records.values())
            if any(record.state is State.SUSPECT for record in records):
                return Outlook.WAIT  # a probe is about to tell
            stale = any(record.state in (State.STALE, State.HEALTHY) for record in records)
            return Outlook.REFIT if stale else Outlook.WAIT

    def lost(self, url: str, version: str | None) -> bool:
        with self._lock:
            record = self._records[url]
            known = record.state in (State.HEALTHY, State.SUSPECT)
            return not known or version not in (None, record.version)

    def answered(self, url: str) -> None:
        self.tell(url, Event(Kind.ANSWERED))

    def unanswered(self, url: str, reason: str) -> None:
        self.tell(url, Event(Kind.REQUEST_FAILED, reason=reason))

    def wrong_version(self, url: str, reason: str) -> None:
        self.tell(url, Event(Kind.WRONG_VERSION, reason=reason))

    @contextmanager
    def in_use(self, on_change: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._pushing.clear()
            self._users += 1
            self._listeners.append(on_change)
            now = self._clock()
            self._last_answer = dict.fromkeys(self.handles, now)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._listeners.remove(on_change)

    # for the supervisor

    def broke(self, error: BaseException) -> None:
        """The supervisor itself ended: no server can be watched any more."""
        with self._lock:
            self._broken = error
            self._wake()

    def _target(self, handle: ServerHandle) -> Target:
        return Target(
            url=handle.url,
            tensor_parallel=handle.tensor_parallel,
            device=handle.device,
            needs_all=self._records[handle.url].version is None,
            api_key=handle.api_key,
            admin_key=handle.admin_key,
        )

    def _must_wait_for_starts(self) -> bool:
        """A server that fails at the very start is the recipe's fault: no restart would help."""
        if self._broken is not None:
            raise self._broken
        for record in self._records.values():
            if record.state in (State.DEAD, State.RETIRED):
                raise RolloutServerError(record.reason)
        return any(record.state is State.STARTING for record in self._records.values())

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        retired = [
            f"{url} was {record.reason}"
            for url, record in self._records.items()
            if record.state is State.RETIRED
        ]
        left = len(self._records) - len(retired)
        if left < self.min_servers:
            raise RolloutServerError(
                f"{left} rollout servers are left and rollout.min_servers={self.min_servers}; "
                f"the last checkpoint is there to go on from; {', '.join(retired)}"
            )

    def _wake(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _report(self, url: str, before: Record, after: Record) -> None:
        if self._is_starting:
            return
        why = after.reason.split("; the end of")[0]
        match after.state:
            case State.DEAD if after.managed:
                seconds = after.retry_at - self._clock()
                self._say(f"rollout server {url} died ({why}); it starts again in {seconds:.0f} s")
            case State.DEAD:
                self._say(f"rollout server {url} is away ({why})")
            case State.RETIRED:
                self._say(f"rollout server {url} is {why}")
            case State.STALE if before.state is not State.SUSPECT:
                self._say(f"rollout server {url} answers and waits for weights")

"""Records of a pool's servers: their states, guarded by one lock and changed by events.

Events come from three callers: the rollout client, a weight push, and the supervisor of the
servers' processes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.state import (
    GONE,
    LOST,
    Action,
    Event,
    EventKind,
    RestartPolicy,
    ServerRecord,
    State,
    transition,
)


class ServerRecords:
    """States of the servers. log: Callback for a line when a server fails, restarts or returns.

    Every method may be called from any thread.
    """

    def __init__(
        self, handles: Sequence[ServerHandle], policy: RestartPolicy, log: Callable[[str], None]
    ) -> None:
        self.handles = {handle.url: handle for handle in handles}
        self.policy = policy
        self.resting = False  # while GPU memory is released: no generating probe, no restart
        now = time.monotonic()
        self._records = {handle.url: _first_record(handle, now) for handle in handles}
        self._last_answer = dict.fromkeys(self.handles, now)
        self._log, self._lock = log, threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listeners: list[Callable[[], object]] = []
        self._pushing: set[str] = set()  # URLs of servers that are receiving weights
        self._num_users = 0  # number of clients that generate now
        self.work_seen = 0  # counts signs of work of servers between their answers
        self.is_starting = True  # until every server has answered once
        self._supervisor_error: BaseException | None = None

    def record(self, url: str) -> ServerRecord:
        with self._lock:
            return self._records[url]

    def apply(self, url: str, event: Event) -> Action:
        """Apply an event to a server's record, and return the action that its supervisor must
        take.
        """
        with self._lock:
            now = time.monotonic()
            before = self._records[url]
            after, action = transition(before, event, now, self.policy)
            self._records[url] = after
            if event.kind is EventKind.ANSWERED:
                self._last_answer[url] = now
            self.work_seen += event.kind in (EventKind.BUSY, EventKind.WORKED)
            if after.busy and not before.busy:
                self._log(
                    f"rollout server {url} is busy: it works and answers no probe; lower "
                    "rollout.image_tokens or rollout.concurrency if this goes on"
                )
            if after.state is not before.state:
                self._log_change(url, before, after)
                self._wake()
            elif after.state in GONE and after.reason != before.reason:
                self._log(f"rollout server {url} is {after.reason}")
            return action

    def add(self, handle: ServerHandle) -> None:
        """Add an external server, or one that was removed once more. It returns as a server does
        that was away: it is probed, and gets the weights before it serves.
        """
        with self._lock:
            now = time.monotonic()
            self.handles = {**self.handles, handle.url: handle}  # others may iterate over the old
            self._records[handle.url] = _first_record(handle, now)
            self._last_answer[handle.url] = now
            self._log(f"rollout server {handle.url} is added")
            self._wake()

    def remove(self, url: str) -> None:
        """Send a server no more requests, unless fewer than rollout.min_servers would be left."""
        with self._lock:
            record, least = self._records[url], self.policy.min_servers
            others = [one.state for other, one in self._records.items() if other != url]
            if sum(state not in LOST for state in others) >= least or record.state in LOST:
                self.apply(url, Event(EventKind.REMOVE))
                return
            reason = f"it stays until {least} others are there (rollout.min_servers)"
            if record.reason != reason:
                self._records[url] = replace(record, reason=reason)
                self._log(f"rollout server {url} is to be removed; {reason}")

    def seconds_in_state(self, url: str) -> float:
        with self._lock:
            return time.monotonic() - self._records[url].since

    def seconds_since_answer(self, url: str) -> float:
        with self._lock:
            return time.monotonic() - self._last_answer[url]

    def may_probe(self, url: str) -> bool:
        """Return False while the server is receiving weights."""
        with self._lock:
            return url not in self._pushing

    @property
    def is_generating(self) -> bool:
        with self._lock:
            return self._num_users > 0

    def wait_while(self, *states: State) -> None:
        """Block until no server is in one of the states. Use it for STARTING and SUSPECT, which end
        by themselves.
        """
        with self._changed:
            while any(record.state in states for record in self._records.values()):
                self._check()
                self._changed.wait(1.0)

    def wait_for_starts(self) -> None:
        """Block until every server has answered once.

        Raises RolloutServerError if one does not start. The cause is the recipe then, so a restart
        would not help.
        """
        with self._changed:
            while any(record.state is State.STARTING for record in self._checked_starts()):
                self._changed.wait(1.0)
            self.is_starting = False

    def supervisor_failed(self, error: BaseException) -> None:
        """Raise `error` in all callers from now on, because the servers are no longer
        supervised.
        """
        with self._lock:
            self._supervisor_error = error
            self._wake()

    def _checked_starts(self) -> list[ServerRecord]:
        if self._supervisor_error is not None:
            raise self._supervisor_error
        named = [url for url, handle in self.handles.items() if not handle.is_added]
        records = [self._records[url] for url in named]
        for record in records:
            if record.state in (*GONE, State.RETIRED):
                raise RolloutServerError(record.reason)
        return records

    def _check(self) -> None:
        if self._supervisor_error is not None:
            raise self._supervisor_error
        lost = [
            f"{url} was {record.reason}"
            for url, record in self._records.items()
            if record.state in LOST
        ]
        left = len(self._records) - len(lost)
        if left < self.policy.min_servers:
            raise RolloutServerError(
                f"{left} rollout servers are left and rollout.min_servers="
                f"{self.policy.min_servers}; the run can resume from its last checkpoint; "
                f"{', '.join(lost)}"
            )

    def _wake(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _log_change(self, url: str, before: ServerRecord, after: ServerRecord) -> None:
        if self.is_starting:
            return
        why = after.reason.split("; the end of")[0]
        match after.state:
            case State.DEAD if after.managed:
                seconds = after.retry_at - time.monotonic()
                self._log(f"rollout server {url} died ({why}); it restarts in {seconds:.0f} s")
            case State.DEAD:
                self._log(f"rollout server {url} is away ({why})")
            case State.AWAY:
                self._log(
                    f"rollout server {url} is {why}; it is looked for as long as the run lives, "
                    "and gets the weights before it serves again"
                )
            case State.RETIRED:
                self._log(f"rollout server {url} is {why}")
            case State.LEAVING:
                self._log(f"rollout server {url} gets no more requests, because it was {why}")
            case State.REMOVED:
                self._log(f"rollout server {url} has left the run and may be stopped")
            case State.STALE if before.state is not State.SUSPECT:
                self._log(f"rollout server {url} answers and waits for weights")


def _first_record(handle: ServerHandle, now: float) -> ServerRecord:
    record = ServerRecord(managed=handle.server is not None, since=now)
    if handle.is_added:
        return replace(record, state=State.DEAD, reason="added, and has not answered yet")
    return record

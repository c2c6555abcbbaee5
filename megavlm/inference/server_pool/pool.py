"""Pool of a run's rollout servers: decides which servers get requests, which need weights, and when
to give up.
"""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megavlm.inference.server_pool.catch_up import CatchUp
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_pool.routing import Address
from megavlm.inference.server_pool.state import SERVING, Event, EventKind, RestartPolicy, State
from megavlm.inference.server_pool.supervisor import Supervisor


class ServerPool(CatchUp):
    """Context manager that is both the Receivers of weight pushes and the Routing of the rollout
    client.

    Entering starts the servers in parallel and returns when all of them answer; it raises
    RolloutServerError if one does not start. With waits=False it returns at once, and the caller
    must call `wait_for_starts` before anything else. Leaving stops the servers that the pool
    started. Every method may be called from any thread.
    """

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        policy: RestartPolicy,
        log: Callable[[str], None] = print,
        states_file: Path | None = None,
        *,
        waits: bool = True,
        joining: Callable[[str], ServerHandle] | None = None,
    ) -> None:
        """states_file: File to which the servers' states are written for `megavlm watch`. joining:
        Function that returns the handle of an external server that the user adds beside it; None
        if servers neither join nor leave.
        """
        super().__init__(handles, policy, log)
        self._supervisor, self._waits = Supervisor(self, states_file, joining), waits

    def __enter__(self) -> "ServerPool":
        with ExitStack() as stack:
            self._supervisor.start()
            stack.callback(self._supervisor.close)  # also on Ctrl-C: no process may be left
            if self._waits:
                self.wait_for_starts()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.close()

    def write_stacks(self) -> None:
        """Make the servers that this pool started write their threads' stack traces to their logs,
        and end.
        """
        for handle in self.handles.values():
            if handle.server is not None:
                handle.server.abort()

    # Receivers: for weight pushes

    def receivers(self, without: Container[str] = ()) -> list[Receiver]:
        with self._lock:
            self._check()
            receivers = [receiver for receiver in self.answering() if receiver.url not in without]
            self._pushing = {receiver.url for receiver in receivers}
            return receivers

    def answering(self) -> list[Receiver]:
        """Return the healthy and stale servers."""
        with self._lock:
            fit = (State.HEALTHY, State.STALE)
            return [
                self._receiver(handle)
                for url, handle in self.handles.items()
                if self._records[url].state in fit and url not in self._catching_up
            ]

    def wait_for_receivers(self) -> None:
        """Block until a server can take weights, possibly after a restart."""
        with self._changed:
            while not self.answering():
                self._check()
                self._changed.wait(1.0)

    def refitted(self, url: str, version: str) -> None:
        with self._lock:
            self._pushing.discard(url)
            self._pushed = version
            self._last_answer[url] = time.monotonic()
            self.apply(url, Event(EventKind.REFITTED, version=version))
            for other, record in self._records.items():  # servers that missed the push
                if other not in self._pushing and record.version not in (None, version):
                    reason = f"it missed the push of weight version {version}"
                    self.wrong_version(other, reason)

    def failed(self, url: str, reason: str) -> None:
        self._missed_push(url, Event(EventKind.SYNC_FAILED, reason=reason))

    def mismatched(self, url: str, reason: str) -> None:
        self._missed_push(url, Event(EventKind.MISMATCH, reason=reason))

    def _missed_push(self, url: str, event: Event) -> None:
        with self._lock:
            self._pushing.discard(url)
            self._log(f"rollout server {url} missed a push: {event.reason}")
            self.apply(url, event)
            self._check()

    # Routing: for the rollout client

    def routable(self, version: str | None) -> list[Address]:
        with self._lock:
            self._check()
            return [
                handle.address
                for url, handle in self.handles.items()
                if self._records[url].routable(version)
            ]

    def lacks_weights(self) -> bool:
        with self._lock:
            self._check()
            states = {record.state for record in self._records.values()}
            # A probe decides the state of a suspect server soon.
            return State.SUSPECT not in states and bool(states & {State.STALE, State.HEALTHY})

    def lost(self, url: str, version: str | None) -> bool:
        with self._lock:
            record = self._records[url]
            known = record.state in SERVING
            return not known or version not in (None, record.version)

    def answered(self, url: str) -> None:
        self.apply(url, Event(EventKind.ANSWERED))

    def request_failed(self, url: str, reason: str) -> None:
        self.apply(url, Event(EventKind.REQUEST_FAILED, reason=reason))

    def wrong_version(self, url: str, reason: str) -> None:
        self.apply(url, Event(EventKind.WRONG_VERSION, reason=reason))

    @contextmanager
    def in_use(self, on_change: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._pushing.clear()
            self._num_users += 1
            self._listeners.append(on_change)
            self._last_answer = dict.fromkeys(self.handles, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._listeners.remove(on_change)

"""A mirror of the server pool in another process. It gets a copy of the servers' states when one
changes, and reports events of servers back to the pool.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.routing import Address
from megavlm.inference.server_pool.state import SERVING, State

Report = tuple[str, str, str]  # name of a ServerPool method, server URL, reason or ""


@dataclass(frozen=True)
class ServerStates:
    """State and address of each server of a pool."""

    states: Mapping[str, State]
    addresses: Mapping[str, Address]

    @classmethod
    def of(cls, pool: ServerPool) -> "ServerStates":
        return cls(
            {url: pool.record(url).state for url in pool.handles},
            {url: handle.address for url, handle in pool.handles.items()},
        )


class ServerProxy:
    """Routing by the states received last. Every healthy server may answer: servers that miss a
    push stop being healthy, so no healthy server has weights that are too old.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        """report: Function that sends a report to `apply_report` in the process with the pool."""
        self._report, self._servers = report, ServerStates({}, {})
        self._listeners: list[Callable[[], object]] = []

    def update(self, servers: ServerStates) -> None:
        self._servers = servers
        for listener in self._listeners:
            listener()

    def routable(self, version: str | None) -> list[Address]:
        states = self._servers.states
        return [a for url, a in self._servers.addresses.items() if states[url] is State.HEALTHY]

    def lacks_weights(self) -> bool:
        states = self._servers.states.values()
        return State.STALE in states and State.SUSPECT not in states

    def lost(self, url: str, version: str | None) -> bool:
        return self._servers.states[url] not in SERVING

    def answered(self, url: str) -> None:
        self._report(("answered", url, ""))

    def request_failed(self, url: str, reason: str) -> None:
        self._set(url, State.SUSPECT)
        self._report(("request_failed", url, reason))

    def wrong_version(self, url: str, reason: str) -> None:
        self._set(url, State.STALE)
        self._report(("wrong_version", url, reason))

    def _set(self, url: str, state: State) -> None:
        """Set a server's state in advance of the pool's own change."""
        states = {**self._servers.states, url: state}
        self._servers = replace(self._servers, states=states)

    @contextmanager
    def in_use(self, on_change: Callable[[], object]) -> Iterator[None]:
        self._listeners.append(on_change)
        try:
            yield
        finally:
            self._listeners.remove(on_change)


def apply_report(pool: ServerPool, report: Report) -> None:
    """Apply a report from the producer's ServerProxy to the pool."""
    method, url, reason = report
    if method == "answered":
        pool.answered(url)
    elif method == "request_failed":
        pool.request_failed(url, reason)
    else:
        pool.wrong_version(url, reason)

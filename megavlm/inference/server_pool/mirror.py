"""The servers of a pool, as another process sees them: a copy of their states, sent when one
changes. What that process learns of a server goes back to the pool.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.routing import Address, Outlook
from megavlm.inference.server_pool.state import State

Report = tuple[str, str, str]  # a method of ServerPool, a server's URL, and a reason or ""


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


class ServerMirror:
    """Routing by the states that were last received. Every healthy server may answer: at each push,
    those that miss it stop being healthy, so that none has weights that are too old.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        """report: sends to `apply_report` of the process that has the pool."""
        self._report, self._servers = report, ServerStates({}, {})
        self._listeners: list[Callable[[], object]] = []

    def update(self, servers: ServerStates) -> None:
        self._servers = servers
        for listener in self._listeners:
            listener()

    def routable(self, version: str | None) -> list[Address]:
        states = self._servers.states
        return [a for url, a in self._servers.addresses.items() if states[url] is State.HEALTHY]

    def outlook(self, version: str | None) -> Outlook:
        states = set(self._servers.states.values())
        if State.SUSPECT in states or State.STALE not in states:
            return Outlook.WAIT
        return Outlook.REFIT

    def lost(self, url: str, version: str | None) -> bool:
        return self._servers.states[url] not in (State.HEALTHY, State.SUSPECT)

    def answered(self, url: str) -> None:
        self._report(("answered", url, ""))

    def request_failed(self, url: str, reason: str) -> None:
        self._set(url, State.SUSPECT)
        self._report(("request_failed", url, reason))

    def wrong_version(self, url: str, reason: str) -> None:
        self._set(url, State.STALE)
        self._report(("wrong_version", url, reason))

    def _set(self, url: str, state: State) -> None:
        """Give a server the state that the pool will give it."""
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
    """Tell a pool what the process of its mirror has learnt of a server."""
    method, url, reason = report
    if method == "answered":
        pool.answered(url)
    elif method == "request_failed":
        pool.request_failed(url, reason)
    else:
        pool.wrong_version(url, reason)

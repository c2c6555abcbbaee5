"""Interface between the rollout client and the servers, and the choice of a server by load."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

SLACK = 1.25  # load that a server may have, in mean loads, before requests go to others


@dataclass(frozen=True)
class Address:
    """URL that requests go to, and its keys. is_local: the server runs on this machine as this
    user, and can read this process's files.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    is_local: bool = False


class Outlook(Enum):
    """Prospect of a routable server when none is."""

    WAIT = "wait"  # one may become routable by itself, or come back stale
    REFIT = "refit"  # one answers and lacks the weights


class Routing(Protocol):
    """The servers, as the rollout client sees them. Used from any thread.

    `routable` and `outlook` raise RolloutServerError when too few servers can ever be left.
    """

    def routable(self, version: str | None) -> list[Address]:
        """Return the servers that may get new requests for weights `version`; None: any."""

    def outlook(self, version: str | None) -> Outlook: ...

    def lost(self, url: str, version: str | None) -> bool:
        """Return True if weights `version` will not answer the requests in flight at a server."""

    def answered(self, url: str) -> None: ...

    def request_failed(self, url: str, reason: str) -> None:
        """Report a lost connection, a time-out, a 5xx status or a malformed response."""

    def wrong_version(self, url: str, reason: str) -> None:
        """Report a response that was sampled with other weights than requested."""

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        """Return the context in which requests are made. `on_change` is called, from any thread,
        when a server's state changes.
        """


def choose_server(key: str, loads: Mapping[str, int], size: int, limit: int) -> str | None:
    """Return the server for a request that takes `size` slots; None if none of those with requests
    has as many of its `limit` left.

    Equal keys give the same server, and most keys keep theirs when a server comes or goes:
    rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018).

    Args:
        key: equal for prompts that show the same images.
        loads: slots taken by server.
    """
    bound = SLACK * (sum(loads.values()) + size) / max(len(loads), 1)
    free = {url: load for url, load in loads.items() if load == 0 or load + size <= limit}
    if not free:
        return None
    fair = [url for url, load in free.items() if load + size <= bound]
    if not fair:
        least = min(free.values())
        fair = [url for url, load in free.items() if load == least]
    return max(fair, key=lambda url: hashlib.sha256(f"{url} {key}".encode()).digest())

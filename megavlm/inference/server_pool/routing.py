"""Interface between the rollout client and the server pool, and the choice of a server by load."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

SLACK = 1.25  # load of a server, relative to the mean, above which requests go to others


@dataclass(frozen=True)
class Address:
    """URL for requests, and its keys. is_local: True if the server runs on this machine as this
    user, so that it can read this process's files. takes_videos: True if the server runs megavlm's
    support for prompts with videos. cache_tokens: Tokens that its prefix cache holds; None if that
    is not known.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    is_local: bool = False
    takes_videos: bool = False
    cache_tokens: int | None = None


class Routing(Protocol):
    """The rollout client's view of the servers. Every method may be called from any thread.

    `routable` and `lacks_weights` raise RolloutServerError when too few servers are left.
    """

    def routable(self, version: str | None) -> list[Address]:
        """Return the servers that may get new requests for weights `version`, or for any if
        None.
        """

    def lacks_weights(self) -> bool:
        """Return True if, where no server is routable, a weight push makes one so: one answers but
        lacks the weights. Otherwise a server may become routable by itself, or come back stale.
        """

    def lost(self, url: str, version: str | None) -> bool:
        """Return True if a server will not answer its requests in flight with weights `version`."""

    def answered(self, url: str) -> None: ...

    def request_failed(self, url: str, reason: str) -> None:
        """Report a lost connection, a timeout, a 5xx status or a malformed response."""

    def wrong_version(self, url: str, reason: str) -> None:
        """Report a response that was sampled with different weights than requested."""

    def in_use(self, on_change: Callable[[], object]) -> AbstractContextManager[None]:
        """Return the context in which requests are made. on_change: Callback, from any thread, when
        a server's state changes.
        """


def choose_server(
    key: str, loads: Mapping[str, int], size: int, limit: int, home: str | None = None
) -> str | None:
    """Return the server for a request that takes `size` slots. Returns None if no server is idle or
    has that many of its `limit` slots free.

    Equal keys give the same server, and most keys keep their server when another comes or goes:
    rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018).

    Args:
        key: Key of the prompt's images, equal for prompts that show the same images.
        loads: Slots taken, by server.
        limit: Slots of each server.
        home: Server that answered the last turn of the session. It has the prefix and the images,
            so it is taken while its load is not above the bound.
    """
    bound = SLACK * (sum(loads.values()) + size) / max(len(loads), 1)
    free = {url: load for url, load in loads.items() if load == 0 or load + size <= limit}
    if not free:
        return None
    fair = [url for url, load in free.items() if load + size <= bound]
    if not fair:
        least = min(free.values())
        fair = [url for url, load in free.items() if load == least]
    if home in fair:
        return home
    return max(fair, key=lambda url: hashlib.sha256(f"{url} {key}".encode()).digest())

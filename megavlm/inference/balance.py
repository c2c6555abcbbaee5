"""Which server a request goes to: by what it shows, unless that server has too much to do."""

import hashlib
from collections.abc import Mapping

SLACK = 1.25  # of the mean load, which a server may have before requests go past it


def choose(key: str, loads: Mapping[str, int], size: int, limit: int) -> str | None:
    """A server for a request of `size` prompts; None where each has `limit` prompts in flight.

    loads: prompts in flight by server. Equal keys give the same server, and most keys keep theirs
    when a server comes or goes (rendezvous hashing with bounded loads).
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

"""HTTP sessions for many requests at a time."""

from collections.abc import Mapping

import aiohttp

KEEP_ALIVE = 4.0  # seconds that an idle connection stays open; SGLang's server closes it after 5


def open_session(connect: float, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Open a session for any number of requests at a time, without a proxy. It needs a running
    event loop. connect: Time to open a connection, in seconds; requests have no other time limit.

    httpx looks at all of its connections when a request begins and ends: with 512 of them, a
    request takes 30 ms of a core, and 0.5 ms here (tests/benchmarks/bench_requests.py).
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(sock_connect=connect),
        headers=headers,
    )

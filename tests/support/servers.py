"""SGLang servers without a pool that supervises them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ManagedServer


@contextmanager
def run_server(server: ManagedServer) -> Iterator[ManagedServer]:
    """Run a server within the context, which begins when it answers."""
    server.launch()
    try:
        wait_until_healthy(server)
        yield server
    finally:
        server.stop()


def wait_until_healthy(server: ManagedServer) -> None:
    deadline = time.monotonic() + server.start_timeout
    with httpx.Client(base_url=server.url, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if reason := server.death():
                raise RolloutServerError(reason)
            with suppress(httpx.TransportError):
                if server.listens and client.get("/health").is_success:
                    return
            time.sleep(0.2)
    raise RolloutServerError(server.with_log(server.too_late))

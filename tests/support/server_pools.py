"""Server pools for tests, and helpers on them."""

import time
from collections.abc import Callable
from typing import Any

from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.fakes.server import FakeServer
from tests.support.timeouts import scaled

POLICY = RestartPolicy(
    max_restarts=2,
    back_off=0.1,
    health_check_timeout=0.1,
    max_failures=2,
    start_timeout=scaled(180),
)


def external(*fakes: FakeServer, **options: Any) -> ServerPool:
    handles = [ServerHandle(fake.url) for fake in fakes]
    return ServerPool(handles, **({"policy": POLICY, "log": lambda line: None} | options))


def push(pool: ServerPool, version: int, fakes: tuple[FakeServer, ...] = ()) -> list[str]:
    """Report a successful weight push to the pool, and return the servers that got it."""
    receivers = pool.receivers()
    for receiver in receivers:
        for fake in fakes:
            if fake.url == receiver.url:
                fake.weight_version = str(version)
        pool.refitted(receiver.url, str(version))
    return [receiver.url for receiver in receivers]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + scaled(180)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pool: ServerPool, url: str) -> State:
    return pool.record(url).state

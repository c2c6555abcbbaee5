"""Memory that servers release and take back, and when they are left alone."""

import time
from collections.abc import Iterator

import pytest

from megavlm.config.rollout import Rollout
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.memory import ServerMemory
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from megavlm.parallel import platform
from tests.fakes.server import FakeServer
from tests.support.timeouts import scaled

FLUSH = "/flush_cache?timeout=20"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(keys=("reads", "writes")) as fake:
        yield fake


@pytest.fixture
def pool(fake: FakeServer) -> Iterator[ServerPool]:
    with ServerPool([ServerHandle(fake.url, "reads", "writes")], policy=RestartPolicy()) as pool:
        push(pool)
        yield pool


def push(pool: ServerPool) -> bool:
    (receiver,) = pool.receivers()
    pool.refitted(receiver.url, "1")
    return receiver.needs_all


def memory(pool: ServerPool, keeps_weights: bool = True) -> ServerMemory:
    backup = {"enable_weights_cpu_backup": keeps_weights}
    return ServerMemory(pool, Rollout(request_timeout=scaled(10), server_args=backup))


def requested(fake: FakeServer) -> list[tuple[str, str]]:
    paths = {RELEASE: "release", RESUME: "resume"}
    return [(paths[p], " ".join(body["tags"])) for p, body, _ in fake.requests if p in paths]


def test_the_order_of_a_step(fake: FakeServer, pool: ServerPool) -> None:
    with memory(pool) as servers:
        servers.release(["kv_cache", "weights"])
        assert pool.resting
        servers.resume(["weights"], starts=False)
        assert pool.resting, "the trainer has memory yet"
        assert not push(pool), "the copy on the host has what training does not change"
        servers.resume(["kv_cache"], starts=True)
        assert not pool.resting
    assert requested(fake) == [
        ("release", "kv_cache weights"),
        ("resume", "weights"),
        ("resume", "kv_cache"),
    ]
    paths = [path for path in fake.paths() if "gener" in path or "flush" in path]
    assert paths[-3:] == ["/pause_generation", "/continue_generation", FLUSH]
    assert fake.paths().index(FLUSH) < fake.paths().index(RELEASE), "it is idle first"


def test_a_server_that_is_not_idle_releases_nothing(fake: FakeServer, pool: ServerPool) -> None:
    """SGLang's scheduler would die of it."""
    fake.refused[FLUSH] = {1}
    with memory(pool) as servers:
        servers.release(["kv_cache", "weights"])
        pool.wait_while(State.SUSPECT)
        assert requested(fake) == [] and pool.record(fake.url).state is State.STALE


def test_what_is_released_is_not_flushed(fake: FakeServer, pool: ServerPool) -> None:
    with memory(pool) as servers:
        servers.release(["kv_cache"])
        servers.release(["weights"])
    assert fake.paths().count(FLUSH) == 1
    assert requested(fake) == [("release", "kv_cache"), ("release", "weights")]


def test_what_is_not_released_is_not_taken_back(fake: FakeServer, pool: ServerPool) -> None:
    """SGLang's scheduler would die of it."""
    with memory(pool) as servers:
        servers.release(["kv_cache"])
        servers.release(["kv_cache", "weights"])
        servers.resume(["weights", "kv_cache"], starts=True)
        servers.resume(["weights", "kv_cache"], starts=True)
    assert requested(fake) == [
        ("release", "kv_cache"),
        ("release", "weights"),
        ("resume", "weights kv_cache"),
    ]


def test_weights_without_a_copy_are_all_sent_again(
    fake: FakeServer, pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    with memory(pool, keeps_weights=False) as servers:
        servers.release(["kv_cache", "weights"])
        servers.resume(["weights"], starts=False)
        assert push(pool)


def test_a_server_that_refuses_is_stale(fake: FakeServer, pool: ServerPool) -> None:
    fake.refused[RELEASE] = {1}
    with memory(pool) as servers:
        servers.release(["kv_cache"])
        pool.wait_while(State.SUSPECT)
        assert pool.record(fake.url).state is State.STALE
    assert "/health_generate" not in fake.paths(), "it may have no memory to generate with"


def test_a_server_at_rest_is_left_alone(
    fake: FakeServer, pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory(pool) as servers:
        servers.release(["kv_cache", "weights"])
        monkeypatch.setattr(supervisor, "PROBE_EVERY", 0.0)
        before = len(fake.requests)
        time.sleep(1.0)
        assert len(fake.requests) == before

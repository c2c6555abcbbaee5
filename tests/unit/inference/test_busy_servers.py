"""A server that answers no probe: busy while it works, dead when it does not."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool import probes, supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import State
from megavlm.inference.server_pool.work import WORK_SHARE, WorkReading
from tests.fakes.server import FakeServer
from tests.support.server_pools import POLICY, external, push, state, wait_for

STUB = Path(__file__).resolve().parents[2] / "fakes" / "stub_sglang"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK", 0.02)
    monkeypatch.setattr(probes, "SLOW", 1.0)


def test_a_managed_server_is_busy_while_it_computes_and_restarts_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("STUB", "busy")
    lines: list[str] = []
    server = ManagedServer(
        ServerOptions("m", dtype="float32", device="cpu"), log_path=tmp_path / "log"
    )
    policy = replace(POLICY, health_check_timeout=3.0)
    with ServerPool([ServerHandle.managed(server)], policy, log=lines.append) as pool:
        push(pool, 1)
        pool.request_failed(server.url, "timed out")
        began = time.monotonic()
        wait_for(lambda: pool.record(server.url).since > began + policy.health_check_timeout)
        record = pool.record(server.url)
        assert record.state is State.SUSPECT and record.busy and record.version == "1"
        assert len(lines) == 1 and "busy" in lines[0] and "rollout.concurrency" in lines[0]
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGSTOP)
        wait_for(lambda: state(pool, server.url) is State.STALE)  # it has restarted
    assert (
        "died" in lines[1] and "no sign of work for 3 s (rollout.health_check_timeout" in lines[1]
    )


def test_an_external_server_is_busy_while_its_counters_change() -> None:
    lines: list[str] = []
    policy = replace(POLICY, health_check_timeout=0.3)
    with FakeServer() as fake, external(fake, policy=policy, log=lines.append) as pool:
        push(pool, 1)
        fake.works = True
        fake.ill.set()
        pool.request_failed(fake.url, "timed out")
        began = time.monotonic()
        wait_for(lambda: pool.record(fake.url).since > began + policy.health_check_timeout)
        assert state(pool, fake.url) is State.SUSPECT and pool.record(fake.url).busy
        fake.works = False
        wait_for(lambda: state(pool, fake.url) is State.DEAD)
    assert (
        "is busy" in lines[0]
        and "is away" in lines[1]
        and "rollout.health_check_timeout" in lines[1]
    )


def test_an_external_server_without_counters_has_the_patience_alone() -> None:
    with (
        FakeServer() as fake,
        external(fake, policy=replace(POLICY, health_check_timeout=0.3)) as pool,
    ):
        push(pool, 1)
        fake.refused = {"/v1/loads?include=core": set(range(1000))}
        fake.ill.set()
        began = time.monotonic()
        pool.request_failed(fake.url, "timed out")
        wait_for(lambda: state(pool, fake.url) is State.DEAD)
        assert time.monotonic() - began >= 0.3, "its health_check_timeout"
        assert not pool.record(fake.url).busy


@pytest.mark.parametrize(
    ("before", "after", "works"),
    [
        (WorkReading(0, cpu_seconds=1), WorkReading(10, cpu_seconds=1.2 + 10 * WORK_SHARE), True),
        (WorkReading(0, cpu_seconds=1), WorkReading(10, cpu_seconds=0.8 + 10 * WORK_SHARE), False),
        (WorkReading(0, counters=[[1, 2]]), WorkReading(10, counters=[[1, 3]]), True),
        (WorkReading(0, counters=[[1, 2]]), WorkReading(10, counters=[[1, 2]]), False),
        (WorkReading(0, counters=[[1, 2]]), WorkReading(10), False),
        (WorkReading(0), WorkReading(10, counters=[[1, 2]]), False),
    ],
)
def test_signs_of_work(before: WorkReading, after: WorkReading, works: bool) -> None:
    assert after.shows_work(before) is works

"""Pushes to a server pool in which servers fail: made again, told on the console, and given up."""

import errno
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from megavlm.parallel.mesh import Layout
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports import disk
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import UPDATE, FakeEngine
from tests.fakes.transports import WatchedTransport
from tests.support.fork import launch
from tests.support.server_pools import state, wait_for
from tests.support.timeouts import scaled
from tests.unit.weight_sync.test_sync_faults import ENTRIES, SHAPES, TRAINED, Model


@contextmanager
def pool_of(lines: list[str], *urls: str, start_timeout: float = 60.0) -> Iterator[ServerPool]:
    policy = RestartPolicy(health_check_timeout=0.1, max_failures=2, start_timeout=start_timeout)
    supervisor.TICK = 0.02  # type: ignore[misc]
    with ServerPool([ServerHandle(url) for url in urls], policy=policy, log=lines.append) as pool:
        yield pool


def pusher(pool: ServerPool, transport: Transport) -> WeightPusher:
    plan = SyncPlan(ENTRIES, TrainerRanks(Layout(), 1, (0,) * 4), frozenset(range(4)))
    sync = WeightSync(
        plan,
        [Model()],  # type: ignore[list-item]
        transport,
        SyncSettings(torch.float32, timeout=scaled(30), bucket_bytes=24),
        receivers=pool,
    )
    state: Any = SimpleNamespace(step=4, mesh=SimpleNamespace(objects=None))
    return WeightPusher(state, sync, pool, None)


def pushed(urls: list[str], folder: Any = None) -> dict[str, Any]:
    """Push four times on this rank; return outcomes, messages and server states."""
    lines: list[str] = []
    outcomes: list[Any] = []
    with pool_of(lines, *urls) as pool:
        weights = pusher(
            pool, TensorTransport(timeout=scaled(30)) if folder is None else DiskTransport(folder)
        )
        for _ in range(4):
            try:
                weights.push()
                outcomes.append(weights.take_reports()[-1].servers)
                pool.wait_while(State.SUSPECT)
            except (RolloutServerError, WeightSyncError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
                break
        states = [pool.record(url).state for url in urls]
    files = [] if folder is None else [path.name for path in folder.rglob("*.safetensors")]
    return {"lines": lines, "outcomes": outcomes, "states": states, "files": files}


@pytest.mark.parametrize("fault", ["500", "reset", "garbage"])
def test_the_only_server_fails_once_and_gets_everything(fault: Any) -> None:
    with FakeEngine(SHAPES) as engine:
        engine.faults[UPDATE, 1] = fault
        (result,) = launch(1, pushed, [engine.url])
        assert result["outcomes"] == [1] * 4 and engine.weight_version == "4"
        (line,) = result["lines"]
        assert line.startswith(f"rollout server {engine.url} missed a push: ") and UPDATE in line


def test_a_server_that_always_fails_ends_the_run() -> None:
    with FakeEngine(SHAPES) as engine:
        engine.refused[UPDATE] = set(range(1, 100))
        (result,) = launch(1, pushed, [engine.url])
        (error,) = result["outcomes"]
        assert error.startswith("RolloutServerError: 0 rollout servers are left")
        assert f"{engine.url} was given up after 3 failed pushes" in error and UPDATE in error
        assert engine.paths().count(UPDATE) == 3


def test_a_second_checksum_that_differs_ends_the_run_with_the_tensors_name() -> None:
    with FakeEngine(SHAPES) as engine:
        engine.spoil = TRAINED[2]
        (result,) = launch(1, pushed, [engine.url])
        (error,) = result["outcomes"]
        assert "given up after 2 pushes with other checksums" in error
        assert f"checksum mismatch on rank 0 in {TRAINED[2]}" in error


def test_of_two_servers_the_one_that_holds_other_tensors_is_given_up_aloud() -> None:
    with FakeEngine(SHAPES) as good, FakeEngine(SHAPES) as bad:
        bad.spoil = TRAINED[2]
        (result,) = launch(1, pushed, [good.url, bad.url])
        assert result["outcomes"] == [1] * 4
        assert result["states"] == [State.HEALTHY, State.RETIRED]
        assert sum(TRAINED[2] in line for line in result["lines"]) == 3
        assert "is given up after 2 pushes" in result["lines"][-1]
        assert bad.paths().count(UPDATE) == 2


def fills_up(urls: list[str], folder: Any) -> dict[str, Any]:
    """The second part finds no place on the disk."""
    save, count = disk.save_file, itertools.count()

    def save_file(tensors: Any, path: Any) -> None:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    disk.save_file = save_file
    return pushed(urls, folder)


def test_a_disk_that_fills_up_in_a_push_is_no_servers_fault(tmp_path: Any) -> None:
    folder = tmp_path / "sync"
    with FakeEngine(SHAPES) as one, FakeEngine(SHAPES) as other:
        (result,) = launch(1, fills_up, [one.url, other.url], folder)
        (error,) = result["outcomes"]
        assert error.startswith("TrainerFault") and f"{folder} cannot be written" in error
        assert "No space left" in error and result["lines"] == []
        for engine in (one, other):
            assert engine.paths().count("/pause_generation") == 1 and not engine.is_paused
        assert result["files"] == [], "what was written of it makes room"


def external_dies_in_a_push() -> dict[str, Any]:
    port, lines, later = ClaimedPort(), list[str](), list[FakeEngine]()
    first = FakeEngine(SHAPES, port=port.number)
    first.__enter__()
    with pool_of(lines, first.url) as pool:
        buckets = itertools.count()

        def come_back() -> None:
            wait_for(lambda: state(pool, first.url) is State.DEAD)
            later.append(FakeEngine(SHAPES, port=port.number))
            later[0].__enter__()

        def die_at_first() -> None:
            if next(buckets) == 0:
                first.__exit__()
                threading.Thread(target=come_back).start()

        pusher(pool, WatchedTransport(die_at_first)).push()
    version, held = later[0].weight_version, len(later[0].weights)
    return {"lines": lines, "version": version, "held": held}


def test_an_external_server_that_dies_in_a_push_is_waited_for() -> None:
    """It is looked at at once, not after it has been silent for long."""
    (result,) = launch(1, external_dies_in_a_push)
    assert result["version"] == "4" and result["held"] == 5, "with everything"
    missed, away, back = result["lines"]
    assert "missed a push" in missed and "is away" in away and "waits for weights" in back


def gone_for_good() -> str:
    engine = FakeEngine(SHAPES)
    engine.__enter__()
    lines: list[str] = []
    with pool_of(lines, engine.url, start_timeout=2.0) as pool:
        weights = pusher(pool, TensorTransport(timeout=scaled(30)))
        engine.__exit__()
        with pytest.raises(RolloutServerError) as raised:
            weights.push()
    return str(raised.value)


def test_an_external_server_that_stays_away_is_not_waited_for() -> None:
    (error,) = launch(1, gone_for_good)
    assert "was away for 2 s (rollout.start_timeout): " in error
    assert "http://127.0.0.1:" in error and "ConnectError" in error
    assert "max_restarts" not in error

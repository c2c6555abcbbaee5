"""Servers on other nodes: run by the first rank of their node, at the orders of rank 0.

Each rank stands for a node; SGLang is a stub.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.config.load import load
from megavlm.inference.connect import server_handles, servers_of_nodes
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import own_address
from megavlm.inference.server_pool import supervisor
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import State
from megavlm.parallel.mesh import build_mesh
from tests.support.fork import launch
from tests.support.server_pools import POLICY, push, state, wait_for
from tests.unit.inference.test_server_pool import STUB

pytestmark = pytest.mark.distributed

Work = Callable[[Path, ServerPool, list[str]], Any]


@pytest.fixture
def recipe(
    request: pytest.FixtureRequest, write_recipe: Callable[..., Path], tmp_path: Path
) -> Path:
    keys = {"colocate": True, "servers": getattr(request, "param", 1)}
    return write_recipe(rollout=keys, run={"dir": str(tmp_path / "run")})


def on_nodes(recipe: Path, stub: str, work: Work) -> Any:
    """Return the result of `work` on rank 0, which gets a pool of all nodes' servers and a list of
    the lines that it logs. Other ranks return how many servers they were given.
    """
    os.environ |= {"PYTHONPATH": str(STUB), "STUB": stub, "LOCAL_WORLD_SIZE": "1"}
    os.environ["MASTER_ADDR"] = "localhost"
    supervisor.TICK = 0.02
    config, mesh, lines = load(recipe), build_mesh(), list[str]()
    with servers_of_nodes(config, "m", mesh, timedelta(minutes=5)) as remote:
        if not mesh.is_driver:
            return len(remote)
        handles = server_handles(config, "m", remote)
        with ServerPool(handles, policy=POLICY, log=lines.append) as pool:
            return work(recipe, pool, lines)


def servers_of(run_dir: Path) -> dict[Path, psutil.Process]:
    """Return the first process of each server of a run, by its log."""
    found = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            parent = psutil.Process(process.ppid())  # of the reaper, a server's first process
            first, other = (" ".join(one.cmdline()) for one in (process, parent))
            if log.parent == run_dir and "server_main" in first and "server_main" not in other:
                found[log] = process
    return found


def first_process(recipe: Path, url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    servers = servers_of(recipe.parent / "run").values()
    return next(process for process in servers if port in process.cmdline())


def describe(recipe: Path, pool: ServerPool, lines: list[str]) -> Any:
    push(pool, 0)
    receivers = pool.receivers()
    local = [address.is_local for address in pool.routable("0")]
    logs = [handle.server.log_path.name for handle in pool.handles.values() if handle.server]
    keys = {receiver.admin_key for receiver in receivers}
    text = repr(receivers) + repr(list(pool.handles.values()))
    return [r.node for r in receivers], local, logs, len(keys), any(str(k) in text for k in keys)


@pytest.mark.parametrize("recipe", [2], indirect=True, ids=["two servers a node"])
def test_rank_0_routes_to_the_servers_of_all_nodes(recipe: Path) -> None:
    (node_of, local, logs, keys, shown), other = launch(2, on_nodes, recipe, "ok", describe)
    assert node_of == [0, 0, 1, 1] and other == 0
    assert local == [True, True, False, False], "paths are for rank 0's node alone"
    assert logs == [f"rollout_server_node{n}_{i}.log" for n in range(2) for i in range(2)]
    assert keys == 4 and not shown
    assert not servers_of(recipe.parent / "run")


def kill_one(recipe: Path, pool: ServerPool, lines: list[str]) -> Any:
    """Kill a server of another node while no server may start, and let it start."""
    push(pool, 0)
    url = next(url for url, handle in pool.handles.items() if handle.node == 1)
    pool.resting = True
    first_process(recipe, url).kill()
    wait_for(lambda: state(pool, url) is State.DEAD)
    time.sleep(5 * POLICY.back_off)
    waited = state(pool, url) is State.DEAD
    pool.resting = False
    wait_for(lambda: state(pool, url) is State.STALE)
    needs_all = {r.url: r.needs_all for r in pool.receivers()}.pop(url)
    return waited, needs_all, [line.split(" (")[0] for line in lines], lines[0], url


def test_a_server_is_started_again_on_its_node_when_servers_may_have_memory(recipe: Path) -> None:
    (waited, needs_all, lines, first, url), _ = launch(2, on_nodes, recipe, "ok", kill_one)
    assert waited and needs_all
    events = ("died", "answers and waits for weights")
    # On a busy machine another server may be late for a probe, and answer again.
    told = [line for line in lines if url in line]
    assert told == [f"rollout server {url} {event}" for event in events]
    assert "ended with exit code -9" in first
    assert not servers_of(recipe.parent / "run")


def fail_to_start(recipe: Path, pool: ServerPool, lines: list[str]) -> str:
    raise AssertionError("it did not start")


def starts(recipe: Path) -> str:
    try:
        on_nodes(recipe, "ok" if os.environ["RANK"] == "0" else "crash", fail_to_start)
    except RolloutServerError as error:
        return str(error)
    return ""


def test_a_server_of_another_node_that_does_not_start_ends_the_run(recipe: Path) -> None:
    error, other = launch(2, starts, recipe)
    assert "ended with exit code 1; the end of" in error and "no such model" in error
    assert "rollout_server_node1" in error and other == ""
    assert not servers_of(recipe.parent / "run")


def lose_node(recipe: Path, pool: ServerPool, lines: list[str]) -> str:
    """The rank of another node ends without a word."""
    url = next(url for url, handle in pool.handles.items() if handle.node == 1)
    parent = first_process(recipe, url).parent()
    assert parent is not None
    parent.kill()
    try:
        while True:
            pool.routable("0")
            time.sleep(0.01)
    except RolloutServerError as error:
        return str(error)


def lost(recipe: Path, folder: Path) -> str:
    result = on_nodes(recipe, "ok", lose_node)
    (folder / "error").write_text(result)
    return str(result)


def test_the_loss_of_a_node_ends_the_run_and_its_servers(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died without a word"):
        launch(2, lost, recipe, tmp_path)
    error = (tmp_path / "error").read_text()
    assert error.startswith("rank 1, which runs the rollout servers of node 1, is gone")
    wait_for(lambda: not servers_of(recipe.parent / "run"))


def test_the_way_to_another_machine() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"

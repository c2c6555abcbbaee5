"""Trainer and servers on the same two nodes. Both nodes are this machine, with two ranks each."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_main import shared_memory_of
from megavlm.process import ExitCode
from tests.e2e.conftest import World
from tests.e2e.running import Running, running
from tests.unit.inference.test_node_servers import servers_of

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 18  # with three switches in each
SECTIONS: dict[str, Any] = {
    "parallel": {"tensor": 2, "data": 2},
    "algorithm": {
        "name": "grpo",
        "steps": STEPS,
        "prompts_per_step": 8,
        "responses_per_prompt": 4,
        "entropy_coefficient": 0.01,
        "importance": "token",
    },
    "optimizer": {"lr": 1e-3},
    "data": {"pack_tokens": 1024},
    "checkpoint": {"every": 4, "export_hf": False},
}
ROLLOUT = {
    "colocate": True,
    "max_new_tokens": 60,
    "max_staleness": 1,
    "oversample": 1.5,
    "server_args": {"log_level": "info"},
}


@contextmanager
def two_nodes(recipe: Path, run_dir: Path) -> Iterator[tuple[Running, Running]]:
    """Start a run on two nodes; it must end within the context, and leave no process."""
    port = ClaimedPort()  # the nodes meet there seconds later
    options = "--nodes", "2", "--master", f"127.0.0.1:{port.number}", "--node-rank"
    with (
        running(recipe, run_dir, *options, "0", forks_servers=False) as first,
        running(recipe, run_dir, *options, "1", forks_servers=False) as second,
    ):
        yield first, second
    words = (
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )
    assert not [line for line in words if str(run_dir.parent) in line]


def ranks(node: Running) -> list[psutil.Process]:
    """Return the processes of a node's ranks, in their order."""
    (agent,) = psutil.Process(node.process.pid).children()
    return sorted(agent.children(), key=lambda process: process.pid)


def kill_in_a_push(node: Running, rank: psutil.Process) -> None:
    """Kill a rank while it sends weights: it has their buffers, files in memory."""

    def sends() -> bool:
        files = Path(f"/proc/{rank.pid}/fd").iterdir()
        with suppress(OSError):  # one is closed meanwhile
            return any("memfd:megavlm" in os.readlink(file) for file in files)
        return False

    def is_killed() -> bool:
        if sends():
            rank.suspend()
            if sends():
                rank.kill()
                return True
            rank.resume()
        return False

    node.wait_until(is_killed)


def shared_memory(run_dir: Path) -> set[str]:
    """Return the files in shared memory of a run's servers."""
    groups = [os.getpgid(server.pid) for server in servers_of(run_dir).values()]
    return set[str]().union(*map(shared_memory_of, groups))


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint: weights, optimizer, random states."""
    reader = StepReader(step_folder(folder / "checkpoints", STEPS))
    return {key: reader.read(key) for key in reader.tensors}


def test_switches_faults_and_a_resume_change_nothing(world: World) -> None:
    """A server of the second node is killed, then that node's first rank in the middle of a push,
    and in the resumed run the whole first node, which has the store. At last the run ends with the
    state of a replay of its rollouts, in which nothing is switched, bit by bit. The replay loses a
    rank in training.
    """
    killed = 128 + signal.SIGKILL
    recipe = world.recipe("shared", **SECTIONS, run={"record_rollouts": True}, rollout=ROLLOUT)
    folder = world.root / "shared"
    with two_nodes(recipe, folder) as (first, second):
        first.wait_for_steps(2)
        rank, log = ranks(second)[0], folder / "rollout_server_node1.log"
        servers_of(folder)[log].kill()
        before = len(log.read_text())
        first.wait_until(lambda: "/generate " in log.read_text()[before:])
        first.wait_for_steps(len(world.metrics("shared")) + 5)
        files = shared_memory(folder)
        kill_in_a_push(first, rank)
    assert (first.process.returncode, second.process.returncode) == (ExitCode.TRANSIENT, killed)
    assert first.output.count("exit code -9") == 1
    assert first.output.count("waits for weights") == 1
    assert "/generate " in log.with_name("rollout_server_node0.log").read_text()
    with two_nodes(recipe, folder) as (first, second):
        first.wait_for_steps(len(world.metrics("shared")) + 1)
        files |= shared_memory(folder)
        first.process.kill()
    assert second.process.returncode == ExitCode.TRANSIENT, second.output
    assert "a rank of another node has ended" in second.output
    assert len(files) > 3 and not [*filter(os.path.exists, files)]
    with two_nodes(recipe, folder) as (first, second):
        pass
    assert (first.process.returncode, second.process.returncode) == (0, 0), first.output
    assert "resumed from step" in first.output
    steps = world.metrics("shared")
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    for step in steps:
        assert step["episodes"] == 32, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4, "all servers had what the trainer has"
        assert step["seconds/switch"] > 0
    assert any("stale_share" in step for step in steps), "partial rollouts outlive a switch"
    replay = world.recipe("alone", **SECTIONS, rollout={"replay": str(folder / "rollouts")})
    with two_nodes(replay, world.root / "alone") as (first, second):
        first.wait_for_steps(5)
        ranks(second)[1].kill()
    assert (first.process.returncode, second.process.returncode) == (ExitCode.TRANSIENT, killed)
    with two_nodes(replay, world.root / "alone") as (first, second):
        pass
    assert first.process.returncode == 0, first.output
    assert "seconds/switch" not in world.metrics("alone")[0]
    shared, alone = state(folder), state(world.root / "alone")
    assert shared.keys() == alone.keys() and any("exp_avg" in key for key in shared)
    trained = sum(x.nbytes for key, x in shared.items() if key.startswith("language_model."))
    assert steps[-1]["sync_bytes"] == 2 * trained, "each server receives its weights once"
    assert [key for key in shared if not torch.equal(shared[key], alone[key])] == []

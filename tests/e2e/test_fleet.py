"""A real server killed in mid-generation: the run starts it again, refits it, and loses nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import World

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GRPO = {
    "name": "grpo",
    "steps": 3,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "entropy_coefficient": 0.01,
}


def server_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if any(word.endswith("serve.py") for word in process.cmdline()):
                return process
        except psutil.Error:
            pass
    return None


def kill_in_mid_generation(run: subprocess.Popen[str], metrics: Path) -> None:
    """When the first step is recorded the second one's rollout begins at once; it takes seconds."""
    while run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n")):
        time.sleep(0.01)
    time.sleep(0.5)
    server = server_of(run)
    assert server is not None
    server.send_signal(signal.SIGKILL)


def test_killed_in_mid_generation(world: World) -> None:
    recipe = world.recipe(
        "killed",
        parallel={"tensor": 2},
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        rollout={"max_new_tokens": 100, "oversample": 1.5},
        data={"pack_tokens": 1024},
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "megavlm", "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as run:
        metrics = world.root / "killed/metrics.jsonl"
        killer = threading.Thread(target=kill_in_mid_generation, args=(run, metrics))
        killer.start()
        output, _ = run.communicate(timeout=280)
        killer.join()
    assert run.returncode == 0, output
    assert "died" in output and "exit code -9" in output and "waits for weights" in output
    steps = world.metrics("killed")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["episodes"] == 16, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4, "it was refitted with what the trainer has"
    # Half of the last steps' tokens were begun by the step before.
    assert all(step["stale_share"] > 0 and step["stale_steps"] == 1 for step in steps[1:])


def test_trainer_and_server_take_turns(world: World) -> None:
    """On a CPU the server's memory stays, and the order of what each gives and takes is real."""
    recipe = world.recipe(
        "colocated",
        parallel={"tensor": 2},
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        rollout={"colocate": True},
        evaluation={"after": True, "sampled": False, "shuffled": False},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("colocated")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["rollout_max_difference"] < 1e-4 for step in steps)

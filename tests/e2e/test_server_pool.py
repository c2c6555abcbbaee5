"""Real servers killed during generation: the run restarts and refits them, and loses nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from megavlm.process import ExitCode
from tests.e2e.conftest import World
from tests.e2e.running import running

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GRPO = {
    "name": "grpo",
    "steps": 3,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "entropy_coefficient": 0.01,
}


def test_killed_in_mid_generation(world: World) -> None:
    recipe = world.recipe(
        "killed",
        parallel={"tensor": 2},
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        rollout={"max_new_tokens": 100},
        data={"pack_tokens": 1024},
    )
    with running(recipe, world.root / "killed") as run:
        # The second step's rollout begins at once; it takes seconds.
        run.wait_for_steps(1)
        time.sleep(0.5)
        run.child("server_main.py").kill()
    assert run.wait() == 0, run.output
    assert "died" in run.output and "exit code -9" in run.output
    assert "waits for weights" in run.output
    steps = world.metrics("killed")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["episodes"] == 16, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4, "it was refitted with what the trainer has"
        assert "stale_share" not in step


@pytest.mark.long
def test_one_of_two_killed(world: World) -> None:
    """The other server takes its requests; it restarts, is refitted, and gets requests again."""
    recipe = world.recipe(
        "two",
        algorithm={**GRPO, "steps": 1000, "prompts_per_step": 8},
        optimizer={"lr": 1e-4},
        rollout={"servers": 2, "max_new_tokens": 60, "server_args": {"log_level": "info"}},
        data={"pack_tokens": 2048},
    )
    logs = [world.root / f"two/rollout_server_{index}.log" for index in range(2)]
    with running(recipe, world.root / "two") as run:
        run.wait_for_steps(2)
        shares = [posts(log.read_text(), "/generate") for log in logs]
        time.sleep(0.2)
        server = run.child("server_main.py")
        killed = Path(os.readlink(f"/proc/{server.pid}/fd/1"))
        server.kill()
        server.wait()
        before = len(killed.read_text())
        run.wait_until(lambda: posts(killed.read_text()[before:], "/generate") >= 2)
        run.wait_for_steps(len(world.metrics("two")) + 2)
        run.process.send_signal(signal.SIGTERM)
    assert run.wait() == ExitCode.STOPPED, run.output
    assert min(shares) >= 2, "requests went to both"
    assert killed in logs and run.output.count("exit code -9") == 1
    assert run.output.count("waits for weights") == 1
    after = killed.read_text()[before:]
    paths = [line.split()[-4] for line in after.splitlines() if '"POST ' in line and " 200" in line]
    first = paths.index("/generate")
    assert "/update_weights_from_tensor" in paths[:first], "weights come before requests"
    steps = world.metrics("two")
    assert [step["step"] for step in steps] == [*range(1, len(steps) + 1)]
    for step in steps:
        assert step["episodes"] == 32, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4, "both had what the trainer has"


def posts(log: str, path: str) -> int:
    return sum(f'"POST {path} ' in line and " 200" in line for line in log.splitlines())


def test_trainer_and_server_take_turns(world: World) -> None:
    """On a CPU the server's memory stays; the trainer's, a critic's too, really goes and comes."""
    recipe = world.recipe(
        "colocated",
        parallel={"tensor": 2},
        # An answer has 4 tokens at most: each is long, so that the critic has something to learn.
        algorithm={**GRPO, "name": "ppo", "critic": "separate", "overlong_buffer": 3},
        optimizer={"lr": 1e-3},
        rollout={"colocate": True},
        checkpoint={"every": 1},
        evaluation={"after": True, "sampled": False, "shuffled": False},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("colocated")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["rollout_max_difference"] < 1e-4 for step in steps)
    assert all(step["critic_gradient_norm"] > 0 for step in steps)
    resumed = world.megavlm("train", recipe, "algorithm.steps=4")
    assert resumed.returncode == 0, resumed.stderr
    last = world.metrics("colocated")[-1]
    assert last["step"] == 4 and last["rollout_max_difference"] < 1e-4

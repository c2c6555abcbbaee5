"""Steps in a stream of batches with the real server: a run whose servers and producer are killed,
and a replay of the same rollouts without streaming.
"""

import re
import time
from typing import Any

import pytest
import torch

from megavlm.process import ExitCode
from tests.e2e.conftest import World
from tests.e2e.running import running
from tests.e2e.test_replay import weights
from tests.e2e.test_staleness import rows_of_steps

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SIZE = 8
SECTIONS: dict[str, Any] = {
    "algorithm": {
        "name": "grpo",
        "steps": 4,
        "prompts_per_step": SIZE,
        "responses_per_prompt": 4,
        "minibatches": 2,
        "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
        "kl_coefficient": 0.01,
    },
    "optimizer": {"lr": 1e-3},
    "data": {"pack_tokens": 320},
    "parallel": {"tensor": 2},
    "checkpoint": {"every": 2, "keep_last": None, "export_hf": False},
}
ROLLOUT = {"max_new_tokens": 60, "streaming": True, "concurrency": 2}


def test_a_run_in_a_stream_is_its_replay_without(world: World) -> None:
    """The servers answer two prompts at a time, so that groups arrive one after the other."""
    recipe = world.recipe("waves", **SECTIONS, run={"record_rollouts": True}, rollout=ROLLOUT)
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("waves")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["episodes"] == 4 * SIZE and step.get("stale_steps", 0) == 0
        assert step["rollout_max_difference"] < 1e-4
    assert max(step["waves"] for step in steps) > 1
    trained = [row for rows in rows_of_steps(world.root / "waves").values() for row in rows]
    assert len(set(trained)) == len(trained) == 4 * 4, "four of each step are recorded"

    replay = {"replay": str(world.root / "waves/rollouts")}
    recipe = world.recipe("waves_replayed", **SECTIONS, rollout=replay)
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(world.metrics("waves_replayed"), steps, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-5)
    before, after = (weights(world.root / name, 4) for name in ("waves", "waves_replayed"))
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=1e-3, atol=1e-4)


def test_a_server_and_the_producer_that_are_killed(world: World) -> None:
    """The server restarts and gets the step's weights again; without its producer the run ends, and
    resumes with each prompt once.
    """
    keys = SECTIONS | {"algorithm": SECTIONS["algorithm"] | {"steps": 6}}
    recipe = world.recipe("waves_killed", **keys, rollout=ROLLOUT)
    with running(recipe, world.root / "waves_killed") as run:
        run.wait_for_steps(1)
        time.sleep(0.3)  # the second step's rollout has begun
        run.child("server_main.py").kill()
        run.wait_for_steps(3)
        assert run.process.poll() is None, run.output
        run.child("megavlm.rollout.ahead.producer").kill()
    assert run.wait() == ExitCode.TRANSIENT, run.output
    assert re.search("waits for weights", run.output)
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("waves_killed")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["episodes"] == 4 * SIZE and step.get("stale_steps", 0) == 0
        assert step["rollout_max_difference"] < 1e-4
    trained = [row for rows in rows_of_steps(world.root / "waves_killed").values() for row in rows]
    assert len(set(trained)) == len(trained) == 6 * 4

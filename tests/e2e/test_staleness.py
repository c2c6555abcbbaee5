"""Rollouts while training, with the real server: a run, a kill between checkpoints, its ledger."""

from pathlib import Path

import pytest

from megavlm.observability.records import read_records
from megavlm.process import ExitCode
from tests.e2e.conftest import World
from tests.e2e.running import running

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GRPO = {
    "name": "grpo",
    "steps": 6,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "entropy_coefficient": 0.01,
}


def rows_of_steps(folder: Path) -> dict[int, list[str]]:
    """Return the rows that each step of the run's records trained on."""
    found: dict[int, list[str]] = {}
    for record in read_records(folder / "samples/rollouts.jsonl"):
        found.setdefault(record["step"], []).append(record["source"])
    return found


def test_pushes_in_place_under_requests(world: World) -> None:
    """Weights are pushed while requests for the next step are answered, which go on."""
    recipe = world.recipe(
        "in_place",
        parallel={"tensor": 2},
        algorithm={**GRPO, "steps": 4},
        optimizer={"lr": 1e-3},
        rollout={"max_new_tokens": 60, "max_staleness": 1},
        data={"pack_tokens": 1024},
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("in_place")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["episodes"] == 16 and step["dropped_groups"] == 0
        assert step.get("stale_steps", 0) <= 1
    trained = [row for rows in rows_of_steps(world.root / "in_place").values() for row in rows]
    assert len(set(trained)) == len(trained) == 16


def test_a_run_that_is_killed_and_resumed(world: World) -> None:
    """The producer is killed in mid-run; the run ends, resumes, and no step repeats a prompt."""
    recipe = world.recipe(
        "ahead",
        parallel={"tensor": 2},
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        # Requests that went on in place would attend to what older weights had cached.
        rollout={
            "max_new_tokens": 60,
            "max_staleness": 2,
            "oversample": 2.0,
            "pause_mode": "abort",
        },
        data={"pack_tokens": 1024},
        checkpoint={"every": 2},
    )
    with running(recipe, world.root / "ahead") as run:
        run.wait_for_steps(3)
        run.child("megavlm.rollout.ahead.producer").kill()
    assert run.wait() == ExitCode.TRANSIENT
    assert "producer of rollouts ended with SIGKILL;" in run.output

    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "resumed from step" in done.stdout + done.stderr
    steps = world.metrics("ahead")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["episodes"] == 16 and step["dropped_groups"] == 0
        assert step.get("stale_steps", 0) <= 2
        # At tokens of the present weights, of which there may be none.
        assert step["rollout_max_difference"] < 1e-4
    # On a starved machine a server may have begun few responses before the push.
    assert any(step.get("staleness/1", 0) > 0 for step in steps)
    assert "servers_idle" in steps[-1]
    trained = [row for rows in rows_of_steps(world.root / "ahead").values() for row in rows]
    assert len(set(trained)) == len(trained) == 24, "each prompt of the first epoch once"

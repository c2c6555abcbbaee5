"""Runs in which agents play the episodes: in step with training, replayed, and ahead of it."""

from typing import Any

import pytest

from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("runs")]
SECTIONS: dict[str, Any] = {
    "data": {"pack_tokens": 1024},
    "algorithm": {"prompts_per_step": 2, "responses_per_prompt": 4, "steps": 2},
    "environment": {
        "name": "gateway",
        "max_turns": 2,
        "max_tokens": 512,
        "options": {"agent": "megavlm.demo.agent:look_again"},
    },
    "optimizer": {"lr": 1e-3},
}


def test_an_agent_is_trained_with_and_replayed(world: World, running: Running) -> None:
    recipe = world.recipe(
        "agent",
        **SECTIONS,
        rollout={**running.rollout, "max_new_tokens": 64},
        evaluation={"after": True, "limit": 4},
        run={"record_rollouts": True},
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    steps = world.metrics("agent")
    for step in steps:
        assert step["rollout_max_difference"] < 1e-4 and step["reward_failures"] == 0
        assert step["episode/branches"] == step["episode/unmatched_messages"] == 0
    assert 1 < max(step.get("turns", 1) for step in steps) <= 2
    replay = {"replay": str(world.root / "agent/rollouts"), "max_new_tokens": 64}
    done = world.megavlm("train", world.recipe("agent_again", **SECTIONS, rollout=replay))
    assert done.returncode == 0, done.stderr
    again = world.metrics("agent_again")
    assert [step["loss"] for step in again] == [step["loss"] for step in steps]


def test_agents_play_ahead_of_training(world: World, running: Running) -> None:
    recipe = world.recipe(
        "agent_ahead",
        **{**SECTIONS, "algorithm": {**SECTIONS["algorithm"], "steps": 3}},
        rollout={
            **running.rollout,
            "max_new_tokens": 64,
            "max_staleness": 1,
            "pause_mode": "abort",
        },
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    for step in world.metrics("agent_ahead"):
        assert step["episodes"] == 8 and step["reward_failures"] == 0

"""Episodes of several turns through the command line: pictures in observations, the real server."""

import pytest

from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_two_turns_are_sampled_and_trained_on(world: World, running: Running) -> None:
    recipe = world.recipe(
        "turns",
        data={"pack_tokens": 1024},
        algorithm={"prompts_per_step": 4, "responses_per_prompt": 4, "steps": 2},
        environment={
            "name": "vqa_retry",
            "max_turns": 2,
            "max_observation_tokens": 48,
            "options": {"show": True},
        },
        optimizer={"lr": 1e-3},
        # A random model ends its turn once in some hundred tokens.
        rollout={**running.rollout, "max_new_tokens": 96},
        curriculum={"stages": [{"until": 1, "tolerance": 1.0}, {}]},
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    first, second = world.metrics("turns")
    assert 1 < max(step.get("turns", 1) for step in (first, second)) <= 2
    for step in (first, second):
        # What the server computed for the tokens of later turns, too, is what the trainer computes
        # for them in its tree.
        assert step["rollout_max_difference"] < 1e-4
        assert step["reward_failures"] == 0
    assert (first["curriculum_stage"], second["curriculum_stage"]) == (1, 2)

"""A run with two teachers through the command line: a server, and the policy itself with a hint."""

import pytest

from megavlm.inference.server_process import API_KEY
from megavlm.inference.teacher import API_KEY as TEACHER_KEY
from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("runs")]


def test_each_task_has_its_teacher(world: World, running: Running) -> None:
    """The server is the policy's own: without a hint it thinks what the policy thinks."""
    server = {"urls": running.rollout["urls"], "rows": ["colour", "compare"]}
    recipe = world.recipe(
        "teachers",
        algorithm={
            "prompts_per_step": 6,
            "responses_per_prompt": 4,
            "steps": 2,
            "kl_coefficient": 0,
        },
        rollout={**running.rollout, "max_new_tokens": 8},
        optimizer={"lr": 1e-3},
        reward={"name": "zero"},
        distillation={
            "teachers": {
                "server": server,
                "told": {"rows": ["count"], "hint": " It is {answer}.", "weight": 0.5},
            }
        },
    )
    keys = {**running.keys, TEACHER_KEY: running.keys[API_KEY]}
    done = world.megavlm("train", recipe, **keys)
    assert done.returncode == 0, done.stderr
    first, second = world.metrics("teachers")
    # Teachers also give probability to suppressed tokens, which shifts their log-probs.
    assert first["kl_teacher/server"] < 1e-3
    assert first["kl_teacher/told"] > 1.5 * first["kl_teacher/server"]
    assert 0 < first["kl_teacher"] < first["kl_teacher/told"]
    for step in (first, second):
        assert step["reward_failures"] == 0 and step["gradient_norm"] > 0
        assert step["rollout_max_difference"] < 1e-4

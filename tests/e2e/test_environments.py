"""Episodes of several turns through the command line: images in observations, the real server."""

import os
from typing import Any

import pytest

from megavlm.demo.shapes import write_dataset
from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("runs")]
RANKING = """
def brief(responses, rows, turns):
    lengths = [sum(map(len, said)) for said in turns]
    others = max(len(responses) - 1, 1)
    return [sum(other > length for other in lengths) / others for length in lengths]
"""


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
        # A random model ends its turn once in some hundred tokens: a step in some thousand has no
        # second turn, but not both steps.
        rollout={**running.rollout, "max_new_tokens": 256},
        curriculum={"stages": [{"until": 1, "tolerance": 1.0}, {}]},
        reward={"parts": {"right": {"name": "vqa"}, "brief": {"name": "my_ranking:brief"}}},
        evaluation={"after": True, "limit": 4},
    )
    (world.root / "my_ranking.py").write_text(RANKING)
    path = os.pathsep.join([str(world.root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = world.megavlm("train", recipe, PYTHONPATH=path, **running.keys)
    assert done.returncode == 0, done.stderr
    first, second = world.metrics("turns")
    assert 1 < max(step.get("turns", 1) for step in (first, second)) <= 2
    for step in (first, second):
        # What the server computed for the tokens of later turns, too, is what the trainer computes
        # for them in its tree.
        assert step["rollout_max_difference"] < 1e-4
        assert step["images_named"] > 0 or step.get("turns", 1) == 1, "later turns name them"
        assert step["images_refused"] == 0
        assert step["reward_failures"] == 0 and 0 < step["reward/part/brief"] < 1
    assert (first["curriculum_stage"], second["curriculum_stage"]) == (1, 2)


OWN: dict[str, dict[str, Any]] = {
    "single_turn": {"data": {"video_key": "videos"}, "task": "moved"},
    "geo3k_calculator": {
        "environment": {
            "max_turns": 2,
            "max_observation_tokens": 48,
            "options": {"show_tools": False},
        }
    },
    "caption": {"reward": {"options": {"reference_key": "answer"}}, "task": "describe"},
    "geospot": {"data": {"extra_keys": ["country", "city", "lat", "lon"]}, "task": "place"},
    "zoom": {
        "data": {"max_pixels": 4096},
        "environment": {
            "max_turns": 2,
            "max_observation_tokens": 64,
            "options": {"show_tools": False, "min_tokens": 4},
        },
        "task": "weave",
    },
}


@pytest.mark.parametrize("name", list(OWN))
def test_an_environment_trains_for_two_steps(world: World, running: Running, name: str) -> None:
    """One of each kind; geo3k's reward is the calculator's, and vqa's is in two turns above."""
    own = dict(OWN[name])
    files = {}
    if task := own.pop("task", None):
        folder = world.root / f"data_{task}"
        write_dataset(folder, seed=0, num_train=24, num_test=6, tasks=[task])
        files = {f"{use}_files": [str(folder / f"{use}.parquet")] for use in ("train", "test")}
    recipe = world.recipe(
        f"environment_{name}",
        data={"pack_tokens": 1024, **files, **own.pop("data", {})},
        algorithm={"prompts_per_step": 2, "responses_per_prompt": 4, "steps": 2},
        environment={"name": name, **own.pop("environment", {})},
        rollout={**running.rollout, "max_new_tokens": 16},
        evaluation={"after": True, "limit": 4},
        **own,
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    for step in world.metrics(f"environment_{name}"):
        assert step["reward_failures"] == 0 and step["rollout_max_difference"] < 1e-4

"""What is done of a step before its last group has arrived, by the recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.training.streaming import streaming_mode

OWN = "tests.unit.algorithms.own:baseline"


@pytest.mark.parametrize(
    ("algorithm", "rollout", "expected"),
    [
        ({}, {}, "gradients"),
        ({}, {"streaming": False}, "nothing"),
        ({}, {"max_staleness": 2}, "gradients"),
        ({}, {"replay": "recorded"}, "nothing"),
        ({"minibatches": 2, "epochs": 2}, {}, "gradients"),
        ({"advantage_estimator": "rloo", "kl_target": 0.1}, {}, "gradients"),
        ({"kl_in": "reward", "kl_estimator": "k1"}, {}, "gradients"),
        ({"dynamic_sampling": 3}, {}, "gradients"),
        ({"advantage_estimator": "reinforce_plus_plus"}, {}, "passes"),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, {}, "passes"),
        ({"name": "ppo"}, {}, "passes"),
        ({"name": "ppo", "critic": "shared"}, {}, "passes"),
        ({"advantage_estimator": OWN}, {}, "nothing"),
    ],
)
def test_what_is_done_early(
    write_recipe: Callable[..., Path], algorithm: Any, rollout: Any, expected: str
) -> None:
    recipe = write_recipe(
        algorithm={"name": "grpo", **algorithm}, rollout={"streaming": True, **rollout}
    )
    assert streaming_mode(load(recipe)) == expected

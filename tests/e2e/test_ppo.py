"""PPO through the command line: a critic of either kind, warmed up, saved and resumed."""

import json
from itertools import pairwise
from typing import Any

import pytest

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("runs")]

PPO: dict[str, Any] = {
    "name": "ppo",
    "prompts_per_step": 4,
    "responses_per_prompt": 2,
    "minibatches": 2,
    "epochs": 2,
    "critic_lr": 1e-2,
    "critic_warmup_steps": 1,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
    # Something for the critic to learn where no response is right either: long ones are worse.
    "overlong_buffer": 3,
}
LAYER = "language_model.decoder.layers.0.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("critic", "parallel"), [("separate", {"tensor": 2}), ("shared", {"context": 2})]
)
def test_two_steps_then_one_more(
    world: World, running: Running, critic: str, parallel: dict[str, int]
) -> None:
    name = f"ppo_{critic}"
    recipe = world.recipe(
        name,
        algorithm={**PPO, "critic": critic, "steps": 2},
        optimizer={"lr": 1e-3, "schedule": "linear"},
        parallel=parallel,
        rollout=running.rollout,
        checkpoint={"every": 1, "keep_last": None, "export_hf": True, "verify_export": True},
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    first, second = world.metrics(name)
    for step in (first, second):
        assert step["rollout_max_difference"] < 1e-4
        assert "rollout_train_kl" in step and step["value_loss"] > 0
    assert "explained_variance" in second and "value_clip_share" in second
    assert second["gradient_norm"] > 0 and second["kl_reference"] >= 0
    # The policy's schedule is of its own four updates: at the last a quarter is left.
    assert second["learning_rate"] == pytest.approx(2.5e-4)

    run = world.root / name
    result = json.loads((run / "result.json").read_text())
    assert result["export_logit_difference"] < 1e-5, "transformers computes the same"
    policies = [StepReader(step_folder(run / "checkpoints", step)) for step in (1, 2)]
    weights = [reader.read(LAYER) for reader in policies]
    assert not weights[0].equal(weights[1]), "the policy learns after the warm-up"
    changed = ("algorithm.steps=3", "checkpoint.verify_export=false")
    resumed = world.megavlm("train", recipe, *changed, **running.keys)
    assert resumed.returncode == 0, resumed.stderr
    *earlier, last = world.metrics(name)
    assert earlier == [first, second] and last["step"] == 3

    folder = "critic_checkpoints" if critic == "separate" else "checkpoints"
    heads = [
        StepReader(step_folder(run / folder, step)).read("value_head.weight") for step in (1, 2, 3)
    ]
    assert heads[0].any(), "the warm-up trains the critic"
    moves = [(later - earlier).norm() for earlier, later in pairwise(heads)]
    assert 0 < moves[1] < heads[2].norm(), "it went on from where it was"
    if critic == "separate":
        assert first["critic_gradient_norm"] > 0 and "gradient_norm" not in first

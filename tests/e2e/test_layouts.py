"""Whole runs under the layouts that the other tests leave out, with adapters, and with
recomputation.
"""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.models.common.lora_linear import is_adapter
from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]

GRPO = {
    "name": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "minibatches": 2,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
}
PIPELINE = {"pipeline": 2, "first_stage_layers": 1}  # of three layers


def grpo(world: World, running: Running, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The result of a run whose server always sampled with the weights that the trainer scores."""
    recipe = world.recipe(
        name,
        algorithm=GRPO,
        optimizer={"lr": 1e-3},
        rollout=running.rollout,
        evaluation={"after": True, "sampled": False, "shuffled": False},
        **sections,
    )
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    steps = world.metrics(name)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout_max_difference"] < 1e-4
        assert step["skipped_updates"] == 0 < step["gradient_norm"]
    assert steps[1]["kl_reference"] > 1e-4, "it moved from the start"
    result: dict[str, Any] = json.loads((world.root / name / "result.json").read_text())
    return result


@pytest.mark.sglang
def test_grpo_on_two_stages(world: World, running: Running) -> None:
    """After each push too; and transformers computes with the export what the ranks compute."""
    checkpoint = {"export_hf": True, "verify_export": True}
    result = grpo(world, running, "stages", parallel=PIPELINE, checkpoint=checkpoint)
    assert result["export_logit_difference"] < 1e-5


@pytest.mark.sglang
def test_grpo_with_adapters(world: World, running: Running) -> None:
    """The server gets the two merged; the checkpoint has the base as it was, and adapters."""
    sections = {"parallel": {"tensor": 2}, "lora": {"rank": 4, "alpha": 16}}
    grpo(world, running, "adapters", **sections)
    reader = StepReader(step_folder(world.root / "adapters/checkpoints", 2))
    layer = "language_model.decoder.layers.0.self_attention.linear_proj"
    assert reader.read(f"{layer}.lora_B_o_proj").abs().max() > 0, "it starts at zero"
    assert {key.split(".")[0] for key in reader.tensors if is_adapter(key)} == {
        "language_model",
        "optimizer",
    }
    weights = load_file(world.root / "model/model.safetensors")
    base = weights["model.layers.0.self_attn.o_proj.weight"]
    assert reader.read(f"{layer}.weight").equal(base)


SFT = {"name": "sft", "steps": 3, "batch_size": 8}
TRAINED_TOWER = {"freeze_tower": False, "freeze_merger": False}


def losses(world: World, name: str, **sections: dict[str, Any]) -> list[float]:
    recipe = world.recipe(
        name, algorithm=SFT, model=TRAINED_TOWER, optimizer={"lr": 1e-3}, **sections
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    return [step["loss"] for step in world.metrics(name)]


@pytest.fixture(scope="module")
def plain_losses(world: World) -> list[float]:
    return losses(world, "plain")


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        (
            "sft_stages",
            {"parallel": PIPELINE, "recompute": {"language": "full", "tower": True}},
        ),
        (
            "sft_contexts",
            {
                "parallel": {"context": 2},
                "recompute": {"language": "selective", "modules": ["core_attn", "mlp"]},
            },
        ),
    ],
)
def test_sft_learns_the_same(
    world: World, plain_losses: list[float], name: str, sections: dict[str, Any]
) -> None:
    assert plain_losses[0] > plain_losses[-1]
    np.testing.assert_allclose(losses(world, name, **sections), plain_losses, rtol=1e-4)

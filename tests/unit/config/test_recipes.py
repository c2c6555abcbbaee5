"""Every recipe of the repository resolves, keeps every rule, and fits the model that it names."""

from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.config.schema import GRPO
from megavlm.training import preflight
from tests.conftest import write_model_folder

RECIPES = Path(__file__).parents[3] / "recipes"
PARTS = {"debug/shapes.yaml", "debug/any.yaml", "grpo/geo3k.yaml"}  # bases only
WHOLE = sorted({str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.yaml")} - PARTS)
# What the hub's config.json of each model says.
SIZES = {
    "3b": (16, 2, 11008, 151936),
    "7b": (28, 4, 18944, 152064),
}
NAMES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
URLS = {"grpo/qwen2_5_vl_7b_geo3k_nodes.yaml": ["rollout.urls=['http://node:30000']"]}


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_resolves_and_fits_its_model(name: str, tmp_path: Path) -> None:
    config = load(RECIPES / name, URLS.get(name, []))
    preflight.check(config, world_size=config.parallel.num_ranks, files=False)
    sizes: dict[str, Any] = next(
        (dict(zip(NAMES, SIZES[k], strict=True)) for k in SIZES if k in name), {}
    )
    preflight.check_model(write_model_folder(tmp_path / "model", **sizes), config)


@pytest.mark.parametrize("name", [name for name in WHOLE if name.startswith("grpo/")])
def test_gpu_recipes_freeze_the_tower_and_use_eight_gpus(name: str) -> None:
    config = load(RECIPES / name, URLS.get(name, []))
    assert config.model.freeze_tower and isinstance(config.algorithm, GRPO)
    assert config.model.dtype == "bfloat16"
    if config.rollout.mode == "managed":
        ranks = config.parallel.num_ranks
        assert config.rollout.server_args["base_gpu_id"] == ranks
        assert ranks + config.rollout.tensor_parallel == 8


def test_the_demo_s_recipe_is_the_measured_one() -> None:
    config = load(RECIPES / "debug/grpo_shapes.yaml")
    assert config.parallel.tensor == 2 and config.model.freeze_tower
    assert isinstance(config.algorithm, GRPO)
    assert (config.algorithm.steps, config.algorithm.responses_per_prompt) == (40, 8)

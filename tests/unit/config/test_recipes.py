"""Every recipe of the repository resolves, keeps every rule, and fits the model that it names."""

from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.config.schema import GRPO, Config
from megavlm.training import preflight
from tests.conftest import write_model_folder
from tests.unit.models.releases import RELEASES

RECIPES = Path(__file__).parents[3] / "recipes"
PARTS = {"debug/shapes.yaml", "debug/any.yaml", "grpo/geo3k.yaml"}  # bases only
PART_FOLDERS = ("algorithms", "data")
WHOLE = sorted(
    name
    for path in RECIPES.rglob("*.yaml")
    if (name := str(path.relative_to(RECIPES))) not in PARTS and not name.startswith(PART_FOLDERS)
)
URLS = ["rollout.urls=['http://node:30000']"]


def resolve(name: str) -> Config:
    return load(RECIPES / name, URLS if "nodes" in name else [])


@pytest.mark.parametrize("name", WHOLE)
def test_a_recipe_resolves_and_fits_its_model(name: str, tmp_path: Path) -> None:
    config = resolve(name)
    preflight.check(config, world_size=config.parallel.num_ranks, files=False)
    release = RELEASES.get(Path(config.model.folder).name.removesuffix("-Instruct"), {})
    assert release or name.startswith("debug/"), "a recipe names a released model"
    preflight.check_model(write_model_folder(tmp_path / "model", **release), config)


@pytest.mark.parametrize("name", [name for name in WHOLE if name.startswith("grpo/")])
def test_gpu_recipes_freeze_the_tower_and_use_eight_gpus(name: str) -> None:
    config = resolve(name)
    assert config.model.freeze_tower and isinstance(config.algorithm, GRPO)
    assert config.model.dtype == "bfloat16"
    if config.rollout.mode == "managed":
        ranks = config.parallel.num_ranks
        assert config.rollout.server_args["base_gpu_id"] == ranks
        assert ranks + config.rollout.tensor_parallel == 8


ALGORITHMS = sorted(path.stem for path in (RECIPES / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("base", ["grpo/qwen2_5_vl_7b_geo3k.yaml", "debug/grpo_shapes.yaml"])
def test_an_algorithm_goes_with_any_recipe(tmp_path: Path, name: str, base: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: [{RECIPES / base}, {RECIPES / 'algorithms' / name}.yaml]")
    assert load(recipe).algorithm != load(RECIPES / base).algorithm
    assert (RECIPES / "debug" / f"{name}_shapes.yaml").is_file()


def test_the_demo_s_recipe_is_the_measured_one() -> None:
    config = load(RECIPES / "debug/grpo_shapes.yaml")
    assert config.parallel.tensor == 2 and config.model.freeze_tower
    assert isinstance(config.algorithm, GRPO)
    assert (config.algorithm.steps, config.algorithm.responses_per_prompt) == (40, 8)

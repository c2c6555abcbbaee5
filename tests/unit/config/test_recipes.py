"""Every recipe of the repository resolves, keeps every rule, and fits the model that it names."""

import asyncio
import shutil
from pathlib import Path

import pytest

from megavlm.config.algorithm import GRPO, DataTraining
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum
from megavlm.rollout.rewards import make_reward_manager
from megavlm.run.checks import preflight
from megavlm.run.checks.model_folder import check_model
from megavlm.tasks.geospot.reward import WEIGHTS
from tests.conftest import write_model_folder
from tests.support.releases import RELEASES

RECIPES = Path(__file__).parents[3] / "recipes"
PARTS = {"debug/shapes.yaml", "debug/any.yaml", "grpo/geo3k.yaml"}  # bases only
PART_FOLDERS = ("algorithms", "data", "environments")
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
    check_model(write_model_folder(tmp_path / "model", **release), config)


@pytest.mark.parametrize("name", [name for name in WHOLE if name.startswith("debug/")])
def test_a_recipe_of_the_demo_takes_fewer_steps_and_longer_responses(name: str) -> None:
    config = load(RECIPES / name, ["algorithm.steps=3", "rollout.max_new_tokens=600"])
    assert config.optimizer.warmup_steps == 0 and config.data.pack_tokens >= 4096


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.startswith("debug/")])
def test_gpu_recipes_freeze_the_tower_and_use_eight_gpus(name: str) -> None:
    config = resolve(name)
    assert config.model.freeze_tower
    assert isinstance(config.algorithm, GRPO) or not name.startswith("grpo/")
    assert config.model.dtype == "bfloat16"
    if config.rollout.mode == "managed" and not isinstance(config.algorithm, DataTraining):
        ranks = 0 if config.rollout.colocate else config.parallel.num_ranks
        assert not config.rollout.gpus, "those after the trainer's"
        assert ranks + config.rollout.servers * config.rollout.tensor_parallel == 8


ALGORITHMS = sorted(path.stem for path in (RECIPES / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_goes_with_any_recipe(tmp_path: Path, name: str) -> None:
    base, recipe = "grpo/qwen2_5_vl_7b_geo3k.yaml", tmp_path / "recipe.yaml"
    recipe.write_text(f"base: [{RECIPES / base}, {RECIPES / 'algorithms' / name}.yaml]")
    assert load(recipe).algorithm != load(RECIPES / base).algorithm
    assert (RECIPES / "debug" / f"{name}_shapes.yaml").is_file()


ENVIRONMENTS = sorted(path.name for path in (RECIPES / "environments").glob("*.yaml"))


def test_the_documented_recipe_with_an_environment_works_as_it_is_written(tmp_path: Path) -> None:
    bases = "base: [../grpo/geo3k.yaml, ../environments/geo3k_calculator.yaml]"
    assert bases in (RECIPES.parent / "docs/guides/environments.md").read_text()
    shutil.copytree(RECIPES, tmp_path / "recipes")
    (tmp_path / "recipes/mine").mkdir()
    (tmp_path / "recipes/mine/mine.yaml").write_text(bases)
    config = load(tmp_path / "recipes/mine/mine.yaml", ["run.dir=x", "model.folder=x"])
    assert config.environment.name == "geo3k_calculator"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_s_base_goes_with_a_model_s_recipe(name: str, tmp_path: Path) -> None:
    bases = [RECIPES / "grpo/qwen2_5_vl_3b_geo3k.yaml", RECIPES / "environments" / name]
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {[str(base) for base in bases]}\n")
    config = load(path)
    preflight.check(config, world_size=config.parallel.num_ranks, files=False)
    Curriculum(config.curriculum)
    manager = (
        make_reward_manager(config) if name != "caption.yaml" else None
    )  # its corpus is not here
    if manager is not None:
        asyncio.run(manager.close())


def test_the_stages_of_geospot() -> None:
    recipe = RECIPES / "environments/geospot.yaml"
    config = load(recipe, ["run.dir=x", "model.folder=x"])
    stages = config.curriculum.stages
    ends = [(stage.until, stage.tolerance) for stage in stages]
    assert ends == [(100, 500), (300, 200), (600, 100), (1000, 50), (None, 25)]
    parts = [set(stage.weights) - {"coordinates"} for stage in stages]
    names = ({"country"}, {"country"}, {"country", "region"}, {"country", "region", "city"})
    assert parts == [*names, names[-1]]
    assert stages[-1].weights == WEIGHTS


def test_the_demo_s_recipe_is_the_measured_one() -> None:
    config = load(RECIPES / "debug/grpo_shapes.yaml")
    assert config.parallel.tensor == 2 and config.model.freeze_tower
    assert isinstance(config.algorithm, GRPO)
    assert (config.algorithm.steps, config.algorithm.responses_per_prompt) == (40, 8)

"""`megavlm plan` as a user sees it: the whole plan, what would fit, and the search for layouts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megavlm.cli import app
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.planner.search import all_layouts, changes, held_bytes, least_bytes, search
from tests.support.levels import slow
from tests.support.releases import released_config
from tests.unit.config.test_recipes import RECIPES

GRPO = RECIPES / "grpo"


def plan(folder: Path, recipe: str, *arguments: str) -> str:
    """Return the plan of a recipe with the configuration that is in `folder`."""
    command = ["plan", str(GRPO / f"{recipe}.yaml"), f"model.folder={folder}", *arguments]
    reply = CliRunner().invoke(app, command)
    assert reply.exit_code == 0, reply.output
    return reply.output


def test_a_plan_has_ranks_memory_and_a_step(tmp_path: Path) -> None:
    released_config("Qwen2.5-VL-7B", tmp_path)
    text = plan(tmp_path, "qwen2_5_vl_7b_geo3k")
    assert text.startswith("4 trainer GPUs: pipeline 1 x data 2 x context 1 x tensor 2\n")
    assert "data      ranks 0, 2 are one group" in text
    assert "Servers: 1, each of 4 GPUs" in text and "\nranks 0-3 " in text
    assert "128 prompts of 1465 tokens" in text and "update MFU 34%" in text
    assert "fit" not in text
    small = plan(tmp_path, "qwen2_5_vl_7b_geo3k", "data.pack_tokens=5120")
    (line,) = [line for line in small.splitlines() if "would fit too" in line]
    assert line.startswith("data.pack_tokens=10240 would fit too (67 GB)")
    few = ("data.pack_tokens=5120", "algorithm.prompts_per_step=2", "algorithm.minibatches=1")
    few += ("algorithm.responses_per_prompt=2", "rollout.max_new_tokens=1024")
    assert "would fit too" not in plan(tmp_path, "qwen2_5_vl_7b_geo3k", *few)


def test_a_pipeline_has_a_bubble_and_a_context_axis_an_exchange(tmp_path: Path) -> None:
    released_config("Qwen2.5-VL-7B", tmp_path)
    axes = ("parallel.pipeline=2", "parallel.context=2", "parallel.data=null")
    text = plan(tmp_path, "qwen2_5_vl_7b_geo3k", "--gpus", "16", *axes)
    assert "16 trainer GPUs: pipeline 2 x data 2 x context 2 x tensor 2" in text
    assert "pipeline  ranks 0, 8 are one group" in text
    assert "bubble is 0%" not in text and " 0.0 over the context" not in text


@pytest.mark.slow
def test_what_would_make_a_recipe_fit_is_named_and_fits(tmp_path: Path) -> None:
    released_config("Qwen2.5-VL-7B", tmp_path)
    text = plan(tmp_path, "qwen2_5_vl_7b_geo3k", "recompute.language=none")
    assert "Does not fit: ranks 0-3 need" in text
    line = next(line for line in text.splitlines() if line.startswith("Would fit: "))
    keys = line.removeprefix("Would fit: ").split(" (")[0].split()
    assert keys == ["recompute.language=selective", "recompute.modules=[mlp]"]
    assert "Does not fit" not in plan(tmp_path, "qwen2_5_vl_7b_geo3k", *keys)
    small = plan(tmp_path, "qwen2_5_vl_7b_geo3k", "--memory", "24")
    assert "No single key makes it fit" in small


@pytest.mark.parametrize(
    ("recipe", "model", "layers", "gpus", "memory"),
    [
        ("qwen2_5_vl_3b_geo3k", "Qwen2.5-VL-3B", 36, 2, 80),
        *slow(("qwen3_vl_30b_a3b_geo3k_nodes", "Qwen3-VL-30B-A3B", 8, 4, 80)),
    ],
)
def test_a_search_finds_layouts_that_fit(
    recipe: str, model: str, layers: int, gpus: int, memory: int, tmp_path: Path
) -> None:
    released_config(model, tmp_path, num_hidden_layers=layers)
    urls = ["rollout.urls=['http://node:30000']"] if "nodes" in recipe else []
    given = (recipe, *urls, "--gpus", str(gpus), "--memory", str(memory))
    text = plan(tmp_path, *given, "--search")
    rows = [line.split() for line in text.splitlines() if "overrides" not in line and "=" in line]
    seconds = [float(row[0]) for row in rows]
    assert (
        rows and seconds == sorted(seconds) and all(float(row[1]) <= 0.9 * memory for row in rows)
    )
    found = plan(tmp_path, *given, *rows[0][2:])
    assert "not fit" not in found and f"{'total':14}{seconds[0]:8.1f} s" in found


@pytest.mark.slow
def test_only_layouts_that_cannot_fit_are_left_out_unseen(tmp_path: Path) -> None:
    config = released_config("Qwen2.5-VL-3B", tmp_path)

    def recipe(*keys: str) -> Config:
        return load(GRPO / "qwen2_5_vl_3b_geo3k.yaml", [f"model.folder={tmp_path}", *keys])

    held = held_bytes(recipe(), config)
    found = [*search(recipe, config, 4, 1e15, [*all_layouts(config, 4)])]
    assert len(found) > 10, "with so much memory all fit"
    for layout in found:
        assert 0 < least_bytes(layout.config.parallel, *held) < layout.memory.fullest


def test_no_layout_that_fits_is_an_error(tmp_path: Path) -> None:
    released_config("Qwen2.5-VL-72B", tmp_path)
    recipe = str(GRPO / "qwen2_5_vl_72b_geo3k_nodes.yaml")
    keys = [f"model.folder={tmp_path}", "rollout.urls=['http://node:30000']"]
    reply = CliRunner().invoke(app, ["plan", recipe, *keys, "--search", "--gpus", "1"])
    assert isinstance(reply.exception, ValueError) and "take more GPUs" in str(reply.exception)


def test_changes_are_overrides() -> None:
    recipe = load(GRPO / "qwen2_5_vl_3b_geo3k.yaml")
    keys = ["parallel.pipeline=2", "parallel.data=null", "recompute.modules=[mlp]"]
    other = load(GRPO / "qwen2_5_vl_3b_geo3k.yaml", keys)
    assert sorted(changes(recipe, other)) == sorted(keys)
    assert [*changes(recipe, recipe)] == []

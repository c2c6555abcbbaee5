"""Recipes and overrides that the documentation shows load, and every key is shown somewhere."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from megavlm.config.load import load, recipe_keys
from megavlm.config.recipe import parse_override
from tests.docs.test_names import CURRENT, ROOT, relative
from tests.docs.test_tutorial import FENCE

PLAIN = "recipes/grpo/qwen2_5_vl_7b_geo3k.yaml"  # stands for RECIPE and for a user's own
REQUIRED = ("run.dir=x", "model.folder=x")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside the repository's recipes, with all recipes that pages give a name."""
    (tmp_path / "recipes/mine").mkdir(parents=True)
    for folder in (ROOT / "recipes").iterdir():
        (tmp_path / "recipes" / folder.name).symlink_to(folder)
    for page in CURRENT:
        for language, title, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if language == "yaml" and title:
                (tmp_path / title).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipes(page: Path) -> Iterator[str]:
    """Yield the YAML blocks of a page."""
    for language, _, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            yield block


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield recipe and overrides of the commands in a page's shell blocks."""
    for language, _, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", "").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words[:1] != ["megavlm"] or words[1:2][0] not in (
                "train",
                "evaluate",
                "rollout",
                "plan",
                "launch",
            ):
                continue
            options = {"--model", "--baseline", "--episodes"}  # keys of `evaluation`
            given = [
                f"evaluation.{word[2:]}={value}"
                for word, value in pairwise(words)
                if word in options
            ]
            overrides = [word for word in words if re.match(r"[a-z]+(\.\w+)+=", word)]
            yield words[2], [*overrides, *given]


def keys(tree: Any) -> set[str]:
    return {f"{name}.{key}" for name, section in tree.items() if name != "base" for key in section}


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_a_page_s_recipes_and_commands_load(page: Path, workplace: Path) -> None:
    for block in recipes(page):
        named = "base: [mine.yaml]" in block or "base: [recipes/" in block
        recipe = workplace / ("example.yaml" if named else "recipes/mine/example.yaml")
        recipe.write_text(block, encoding="utf-8")
        load(recipe, REQUIRED)
    for recipe_name, overrides in commands(page):
        own = Path(recipe_name) if Path(recipe_name).is_file() else Path(PLAIN)
        of_job = ["rollout.urls=['http://node:30000']"] if "_nodes" in own.name else []
        load(own, [*REQUIRED, *of_job, *overrides])


def test_every_key_is_set_by_a_recipe_or_an_example() -> None:
    shown = set[str]()
    for recipe in (ROOT / "recipes").rglob("*.yaml"):
        shown |= keys(yaml.safe_load(recipe.read_text(encoding="utf-8")))
    for page in CURRENT:
        for block in recipes(page):
            shown |= keys(yaml.safe_load(block))
        for _, overrides in commands(page):
            for override in overrides:
                shown |= keys(OmegaConf.to_container(parse_override(override)))
    assert not sorted(set(recipe_keys()) - shown), "show them where users need them, or remove them"

"""The reference of the configuration is generated from a docstring under each key."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from megavlm.config import section

FILES = sorted(Path(section.__file__).parent.glob("*.py"))
NOT_SECTIONS = {"Bounds", "Config"}


def dataclasses() -> list[ast.ClassDef]:
    classes = [
        node
        for path in FILES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.decorator_list
    ]
    return [node for node in classes if node.name not in NOT_SECTIONS]


@pytest.mark.parametrize("cls", dataclasses(), ids=lambda cls: cls.name)
def test_each_key_has_a_docstring(cls: ast.ClassDef) -> None:
    fields = 0
    for node, following in pairwise([*cls.body, ast.Pass()]):
        if not isinstance(node, ast.AnnAssign):
            continue
        fields += 1
        assert isinstance(node.target, ast.Name)
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        assert documented, f"{cls.name}.{node.target.id} has no docstring"
        text = following.value.value
        assert isinstance(text, str)
        assert text[0].isupper() and text.endswith("."), f"{cls.name}.{node.target.id}: {text}"
    assert fields


def test_each_section_is_found() -> None:
    names = {cls.name for cls in dataclasses()}
    assert {
        "RunConfig",
        "Data",
        "Rollout",
        "GRPO",
        "PPO",
        "SFT",
        "CurriculumStage",
        "RewardPart",
    } <= names

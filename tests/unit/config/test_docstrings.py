"""The reference of the configuration is generated from a docstring under each key."""

import ast
from itertools import pairwise
from pathlib import Path

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


def test_each_key_has_a_docstring() -> None:
    found = set()
    for cls in dataclasses():
        for node, following in pairwise([*cls.body, ast.Pass()]):
            if not isinstance(node, ast.AnnAssign):
                continue
            found.add(cls.name)
            assert isinstance(node.target, ast.Name)
            name = f"{cls.name}.{node.target.id}"
            assert isinstance(following, ast.Expr), f"{name} has no docstring"
            assert isinstance(following.value, ast.Constant), f"{name} has no docstring"
            text = following.value.value
            assert isinstance(text, str)
            assert text[0].isupper() and text.endswith("."), f"{name}: {text}"
    sections = "RunConfig Data Rollout GRPO PPO SFT CurriculumStage RewardPart"
    assert found >= set(sections.split())

"""The sections environment, reward and curriculum: what they refuse, and in which words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.config.cross_rules import longest_session
from megavlm.config.curriculum import CurriculumStage
from megavlm.config.dump import to_yaml
from megavlm.config.load import load

WriteRecipe = Callable[..., Path]
PARTS = "reward.parts={a: {name: vqa}, b: {name: caption, weight: 2}}"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [
                "data.pack_tokens=4096",
                "environment.max_turns=3",
                "environment.max_observation_tokens=1600",
            ],
            r"data.pack_tokens=4096 cannot hold a prompt and one episode.* up to 4236 tokens",
        ),
        (["environment.max_turns=0"], "environment.max_turns=0 is out of range"),
        ([PARTS, "reward.name=vqa"], "reward.name=vqa would not be used with reward.parts"),
        ([PARTS, "reward.options={right: 2}"], "reward.options=.* would not be used"),
        (["reward.parts={a: {weight: 1}}"], "reward.parts.a has no name"),
        (["reward.parts={'a b': {name: vqa}}"], "reward.parts has the label 'a b'"),
        (["reward.parts={a: {name: vqa, weight: .inf}}"], "reward.parts.a.weight=inf must be"),
        (["reward.parts={a: {nam: vqa}}"], "reward.parts=.* it must be labels, each with keys of"),
        (["reward.memory_mb=10"], "reward.memory_mb=10 is out of range"),
        (["reward.on_failure=retry"], "reward.on_failure=.* it must be one of zero, skip, stop"),
        (["curriculum.stages=[{until: 5}]"], r"curriculum.stages\[0\] ends, but it is the last"),
        (["curriculum.stages=[{}, {}]"], r"curriculum.stages\[0\] never ends"),
        (["curriculum.stages=[{until: 5}, {until: 5}, {}]"], r"stages end at \[5, 5\]"),
        (["curriculum.stages=[{until: 0}, {}]"], r"stages end at \[0\]"),
        (["curriculum.stages=[{reward: .nan}, {}]"], r"stages\[0\].reward=nan must be a finite"),
        (["curriculum.stages=[{tolerance: .nan}]"], "tolerance=nan must be above 0"),
        (["curriculum.stages=[{tolerance: 0}]"], "tolerance=0.0 must be above 0"),
        (["curriculum.stages=[{weights: {a: -1}}]"], "must be numbers of at least 0"),
        ([PARTS, "curriculum.stages=[{weights: {c: 1}}]"], "names 'c', but reward.parts"),
        (["curriculum.stages=[{untl: 5}]"], "each keys of until, reward, weights, tolerance"),
    ],
)
def test_refused(write_recipe: WriteRecipe, overrides: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load(write_recipe(), overrides)


def test_stages_and_parts_survive_the_written_recipe(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    stages = "curriculum.stages=[{until: 5, reward: 0.5, weights: {a: 1}}, {tolerance: 2}]"
    config = load(write_recipe(), [PARTS, stages])
    assert config.curriculum.stages == [
        CurriculumStage(until=5, reward=0.5, weights={"a": 1.0}),
        CurriculumStage(tolerance=2.0),
    ]
    assert [part.weight for part in config.reward.parts.values()] == [1.0, 2.0]
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["environment.max_turns=3"], 3 * 128 + 2 * 256),
        (["environment.max_turns=9", "environment.max_tokens=1200"], 1200),
        ([], None),
        (["environment={name: gateway, max_turns: 3, max_tokens: 1200}"], 1200),
    ],
)
def test_the_longest_session(
    write_recipe: WriteRecipe, overrides: list[str], tokens: int | None
) -> None:
    config = load(write_recipe(), ["rollout.max_new_tokens=128", *overrides])
    assert longest_session(config) == tokens

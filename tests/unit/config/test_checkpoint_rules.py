"""Rules of the section about checkpoints."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from megavlm.config.checkpoint import CRITIC, POLICY, SUPERVISED, nearest_metrics
from megavlm.config.evaluation import MEASURES
from megavlm.config.load import load
from tests.support.glossary import entries, unexplained

BASE = {"run": {"dir": "x"}, "model": {"folder": "m"}, "data": {"test_files": ["t"]}}
KEEP = ("checkpoint.every=10", "checkpoint.keep_last=2")
GREEDY = "checkpoint.best_metric=evaluation/greedy"

BROKEN = {
    ("checkpoint.verify_export=true",): "has nothing to verify with checkpoint.export_hf=false",
    ("checkpoint.keep_last=0",): "checkpoint.keep_last=0 is out of range: set it to a number at l",
    ("checkpoint.keep_every=0", *KEEP): "checkpoint.keep_every=0 is out of range",
    ("checkpoint.step=-1",): "checkpoint.step=-1 is out of range",
    ("checkpoint.best_mode=highest",): "has the wrong type: it must be one of max, min",
    ("checkpoint.async=true",): "unknown key checkpoint.async: did you mean checkpoint.async_save?",
    ("checkpoint.step=4", "run.resume=never"): "but run.resume=never resumes from none: remove one",
    (
        "checkpoint.every=10",
        "checkpoint.keep_every=20",
        "checkpoint.keep_last=null",
    ): "checkpoint.keep_last=null deletes none: set checkpoint.keep_last, or remove it",
    (
        *KEEP,
        "checkpoint.keep_every=25",
    ): "checkpoint.keep_every=25 must be a multiple of checkpoint.every=10",
    (
        "checkpoint.keep_last=1",
        "checkpoint.keep_every=5",
    ): "checkpoint.keep_every=5 must be a multiple of checkpoint.every=20",
    (
        "checkpoint.best_metric=rewards",
    ): "checkpoint.best_metric=rewards is not a metric of training steps: choose one of",
    ("checkpoint.best_metric=evaluation/loss",): "choose one of evaluation/greedy, evaluation/samp",
    (
        "checkpoint.best_metric=evaluation/shuffled/count",
        "evaluation.every=5",
        "evaluation.shuffled=false",
    ): "is not measured with evaluation.shuffled=false",
    (GREEDY,): "checkpoint.best_metric=evaluation/greedy needs evaluations of saved steps",
    (GREEDY, "evaluation.before=true"): "set evaluation.every to checkpoint.every",
}
KEPT = (
    (*KEEP, "checkpoint.keep_every=20", GREEDY, "evaluation.every=10"),
    (GREEDY, "evaluation.after=true"),
    ("checkpoint.best_metric=reward/part/a",),
    ("checkpoint.best_metric=loss", "checkpoint.best_mode=min", "checkpoint.keep_last=1"),
    ("checkpoint.step=0", "checkpoint.async_save=false"),
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(BASE))
    return path


@pytest.mark.parametrize("overrides", BROKEN, ids=" ".join)
def test_a_broken_rule_is_one_sentence(recipe: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        load(recipe, overrides)
    message = str(error.value)
    assert BROKEN[overrides] in message and "\n" not in message


@pytest.mark.parametrize("overrides", KEPT, ids=" ".join)
def test_what_makes_sense_is_taken(recipe: Path, overrides: tuple[str, ...]) -> None:
    config = load(recipe, overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        section, name = key.split(".")
        assert str(getattr(getattr(config, section), name)).lower() == value


def test_the_names_of_metrics_are_those_that_the_reference_explains() -> None:
    written = [name for name in entries() if name not in ("step", "time")]
    assert [name for name in written if nearest_metrics(name)] == []
    assert unexplained({*SUPERVISED, *POLICY, *CRITIC}) == set()


def test_the_measures_are_those_of_an_evaluation() -> None:
    from megavlm.evaluation.result import EvaluationResult

    assert [item.name for item in fields(EvaluationResult)] == [*MEASURES, "seconds", "failures"]

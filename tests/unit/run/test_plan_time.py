"""Modelled steps: each part by hand, and the documentation's numbers are what the code computes."""

from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.run.capacity.memory import GB, RunMemory
from megavlm.run.capacity.time import Rates, StepModel
from tests.support.levels import slow
from tests.unit.config.test_recipes import RECIPES
from tests.unit.run.estimates import SET_UPS, SetUp, resolved, tables

PAGE = Path(__file__).parents[3] / "docs" / "estimates.md"
SEVEN, _, COLOCATED, MOE, LARGE, HUGE = SET_UPS


@pytest.mark.slow
def test_the_documented_numbers_are_what_the_code_computes(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for line in tables(tmp_path):
        assert line in text, f"{line}: print the tables with python -m tests.unit.run.estimates"


@pytest.mark.parametrize(
    ("set_up", "trainers", "keys", "gigabytes"),
    [
        (MOE, 8, (), "81 GB would be needed"),
        (HUGE, 64, ("pipeline=8", "first_stage_layers=11", "last_stage_layers=11"), "on 64, 76 GB"),
    ],
)
def test_the_documented_reasons_are_what_the_code_computes(
    set_up: SetUp, trainers: int, keys: tuple[str, ...], gigabytes: str, tmp_path: Path
) -> None:
    given = replace(set_up, overrides=[f"parallel.{key}" for key in keys])
    memory = RunMemory.of(*resolved(given, tmp_path), trainers)
    assert f"{memory.fullest / GB:.0f} GB" in gigabytes
    assert gigabytes in PAGE.read_text().replace("\n", " ")


def model(set_up: SetUp, folder: Path, rates: Rates | None = None) -> StepModel:
    config, hf_config = resolved(set_up, folder)
    return StepModel(config, hf_config, set_up.trainers, set_up.servers, rates)


def test_flops_are_two_per_parameter_and_token(tmp_path: Path) -> None:
    """And what attention adds, which is little at these lengths."""
    seven = model(SEVEN, tmp_path)
    step, parameters = seven.step, 6.53e9  # of 28 layers
    plain = 2 * parameters * step.tokens + 2 * 152064 * 3584 * step.targets
    assert plain < seven.forward_flops < 1.1 * plain
    assert step.prompt == 1337 + 128 and step.tokens == 128 * (1465 + 8 * 1024)
    thirty = model(MOE, tmp_path)
    assert thirty.forward_flops < 0.5 * seven.forward_flops, "3 of 30 billion are active"


@pytest.mark.parametrize("set_up", [SEVEN, COLOCATED, *slow(LARGE)])
def test_the_phases_make_the_step(set_up: SetUp, tmp_path: Path) -> None:
    seconds = model(set_up, tmp_path).seconds()
    total = seconds.pop("total")
    assert total == pytest.approx(sum(seconds.values())) and min(seconds.values()) > 0
    assert ("switch" in seconds) == (set_up is COLOCATED)


def changed(folder: Path, set_up: SetUp, *keys: str) -> dict[str, float]:
    """Seconds with other keys of the recipe."""
    urls = ["rollout.urls=['http://node:30000']"] if "nodes" in set_up.recipe else []
    config = load(RECIPES / f"grpo/{set_up.recipe}.yaml", [*urls, *set_up.overrides, *keys])
    _, hf_config = resolved(set_up, folder)
    return StepModel(config, hf_config, set_up.trainers, set_up.servers).seconds()


@pytest.mark.slow
def test_each_saving_shortens_its_phase(tmp_path: Path) -> None:
    plain = model(SEVEN, tmp_path).seconds()
    none = changed(tmp_path, SEVEN, "recompute.language=none")
    full = changed(tmp_path, SEVEN, "recompute.language=full")
    assert full["update"] - none["update"] > 0.9 * none["reference"], "a forward pass"
    cut = changed(tmp_path, SEVEN, "data.pack_tokens=6144")
    assert 1.1 < cut["reference"] / plain["reference"] < 1.2, "prompts in two packs"
    assert changed(tmp_path, SEVEN, "algorithm.kl_coefficient=0")["reference"] == 0
    assert changed(tmp_path, SEVEN, "algorithm.minibatches=1")["old log-probs"] == 0
    shorter = changed(tmp_path, SEVEN, "rollout.max_new_tokens=1024")
    assert shorter["rollout"] < 0.6 * plain["rollout"]


def test_rates_bound_their_phases(tmp_path: Path) -> None:
    plain = model(SEVEN, tmp_path).seconds()
    fast = model(SEVEN, tmp_path, Rates(nvlink=1e18)).seconds()
    assert fast["sync"] < 0.01 * plain["sync"] and fast["rollout"] == plain["rollout"]
    slow = model(SEVEN, tmp_path, Rates(memory=1e12)).seconds()
    assert slow["rollout"] > 1.2 * plain["rollout"] and slow["update"] == plain["update"]


@pytest.mark.slow
def test_a_pipeline_has_bubbles(tmp_path: Path) -> None:
    """Twice as many packs in a pass halve their share: 3 of 16 or 32 packs on each data rank."""
    two = model(LARGE, tmp_path).seconds()["reference"]
    one = changed(tmp_path, LARGE, "algorithm.minibatches=1")["reference"]
    assert two / one == pytest.approx((1 + 3 / 32) / (1 + 3 / 64))

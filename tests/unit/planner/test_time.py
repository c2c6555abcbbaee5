"""Modelled steps: each part by hand, and the documentation's numbers are what the code computes."""

from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.planner.memory import GB, RunMemory
from megavlm.planner.rates import Rates
from megavlm.planner.time import StepModel
from tests.support.levels import slow
from tests.unit.planner.estimates import SET_UPS, SetUp, modelled, published, resolved, tables

PAGE = Path(__file__).parents[3] / "docs" / "estimates.md"
SEVEN, _, COLOCATED, MOE, _, LARGE, _, HUGE, SHARED_HUGE, LINEAR = SET_UPS
ON_EIGHT_STAGES = (
    "parallel.pipeline=8",
    "parallel.first_stage_layers=11",
    "parallel.last_stage_layers=11",
    "recompute.language=full",
)


@pytest.mark.slow
def test_the_documented_numbers_are_what_the_code_computes(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for line in filter(None, tables(tmp_path)):
        assert line in text, f"{line}: run python -m tests.unit.planner.estimates"


@pytest.mark.parametrize("set_up", SET_UPS, ids=lambda set_up: set_up.name)
def test_the_documented_cluster_is_the_one_that_the_recipe_starts(set_up: SetUp) -> None:
    assert f"| {set_up.name} | {set_up.cluster.name} | " in PAGE.read_text()


@pytest.mark.parametrize(
    ("set_up", "trainers", "keys", "gigabytes"),
    [
        (MOE, 8, (), "91 GB would be needed"),
        (HUGE, 64, ON_EIGHT_STAGES, "on 64, 76 GB"),
    ],
)
def test_the_documented_reasons_are_what_the_code_computes(
    set_up: SetUp, trainers: int, keys: tuple[str, ...], gigabytes: str, tmp_path: Path
) -> None:
    given = replace(set_up, overrides=keys)
    memory = RunMemory.of(*resolved(given, tmp_path), trainers)
    assert f"{memory.fullest / GB:.0f} GB" in gigabytes
    assert gigabytes in PAGE.read_text().replace("\n", " ")


def test_flops_are_two_per_parameter_and_token(tmp_path: Path) -> None:
    """And what attention adds, which is little at these lengths."""
    seven = modelled(SEVEN, tmp_path)
    step, parameters = seven.step, 6.53e9  # of 28 layers
    plain = 2 * parameters * step.tokens + 2 * 152064 * 3584 * step.targets
    assert plain < seven.forward_flops < 1.1 * plain
    assert step.prompt == 1337 + 128 and step.tokens == 128 * (1465 + 8 * 1024)
    thirty = modelled(MOE, tmp_path)
    assert thirty.forward_flops < 0.5 * seven.forward_flops, "3 of 30 billion are active"


@pytest.mark.parametrize("set_up", [SEVEN, COLOCATED, *slow(LARGE)])
def test_the_phases_make_the_step(set_up: SetUp, tmp_path: Path) -> None:
    seconds = modelled(set_up, tmp_path).seconds()
    total = seconds.pop("total")
    assert total == pytest.approx(sum(seconds.values())) and min(seconds.values()) > 0
    assert ("switch" in seconds) == (set_up is COLOCATED)


def changed(folder: Path, set_up: SetUp, *keys: str) -> dict[str, float]:
    """Seconds with other keys of the recipe."""
    return modelled(replace(set_up, overrides=(*set_up.overrides, *keys)), folder).seconds()


@pytest.mark.slow
def test_each_saving_shortens_its_phase(tmp_path: Path) -> None:
    plain = modelled(SEVEN, tmp_path).seconds()
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
    plain = modelled(SEVEN, tmp_path).seconds()
    fast = modelled(SEVEN, tmp_path, Rates(sync_round=0.0)).seconds()
    assert plain["sync"] - fast["sync"] == pytest.approx(2 * 0.01), "3.8 GB in buckets of 2 GiB"
    assert fast["rollout"] == plain["rollout"]
    slow = modelled(SEVEN, tmp_path, Rates(memory=1e12)).seconds()
    assert slow["rollout"] > 1.2 * plain["rollout"] and slow["update"] == plain["update"]


def test_changes_save_bytes_on_a_slow_network(tmp_path: Path) -> None:
    """And cost passes over all weights on a fast one."""
    plain, deltas = (
        [
            modelled(set_up, tmp_path, Rates(network=speed, nvlink=speed)).seconds()["sync"]
            for speed in (1e9, 1e15)
        ]
        for set_up in (SEVEN, replace(SEVEN, overrides=("rollout.sync_delta=true",)))
    )
    assert deltas[0] < 0.15 * plain[0] and deltas[1] > plain[1]


def test_servers_get_weights_from_ranks_of_their_node(tmp_path: Path) -> None:
    """All of them, the frozen tower's too; over the network what no rank there has."""
    whole = modelled(COLOCATED, tmp_path)
    slow_network = modelled(COLOCATED, tmp_path, Rates(network=1.0))
    assert whole.received > 1.05 * modelled(SEVEN, tmp_path).received * 2, "a server has two ranks"
    assert slow_network.seconds()["sync"] == whole.seconds()["sync"]
    assert modelled(SHARED_HUGE, tmp_path, Rates(network=1e9)).seconds()["sync"] == pytest.approx(
        11 / 12 * 471e9 / 8 / 1e9, rel=0.1
    )


@pytest.mark.parametrize("set_up", [SEVEN, LINEAR])
def test_core_attention_takes_time_when_it_is_recomputed(set_up: SetUp, tmp_path: Path) -> None:
    """Its own FLOPs, without projections: less than a forward pass of the MLPs."""
    none, core, mlp = (
        changed(tmp_path, set_up, *keys)["update"]
        for keys in (
            ("recompute.language=none",),
            ("recompute.language=selective", "recompute.modules=[core_attn]"),
            ("recompute.language=selective", "recompute.modules=[mlp]"),
        )
    )
    assert none < core < mlp


@pytest.mark.slow
def test_busy_experts_are_waited_for(tmp_path: Path) -> None:
    """Of a token's FLOPs nine tenths are in experts; groups of 16 send them over the network."""
    even = modelled(replace(MOE, overrides=["parallel.expert=1"]), tmp_path)
    eight = modelled(MOE, tmp_path)
    share = eight.seconds()["reference"] / eight.over_ideal
    assert share > 1.25 * even.seconds()["reference"] / even.over_ideal
    wide = modelled(replace(MOE, overrides=["parallel.expert=16"]), tmp_path)
    assert wide.seconds()["reference"] > 1.5 * eight.seconds()["reference"]


def test_a_step_ahead_takes_as_long_as_its_longer_half(tmp_path: Path) -> None:
    ahead = modelled(SetUp("", "qwen2_5_vl_7b_geo3k_ahead"), tmp_path)
    seconds = ahead.seconds()
    training = sum(ahead.training().values())
    assert seconds["total"] == pytest.approx(max(training, seconds["rollout"]) + seconds["sync"])


def test_a_step_in_a_stream_ends_after_its_rollout_and_its_training(tmp_path: Path) -> None:
    stream = modelled(SetUp("", "qwen2_5_vl_7b_geo3k_streaming"), tmp_path)
    seconds, training = stream.seconds(), sum(stream.training().values())
    late = training - stream.early()
    assert stream.early() == pytest.approx(training - seconds["update"] / 2, rel=0.02)
    assert seconds["total"] > max(seconds["rollout"] + late, training) + seconds["sync"]
    assert seconds["total"] < 0.85 * (seconds["rollout"] + training + seconds["sync"])


def test_only_what_is_done_early_overlaps(tmp_path: Path) -> None:
    """PPO's and REINFORCE++'s updates wait for the last group, and a function of one's own for all;
    with groups that arrive together nothing is early.
    """
    recipe = SetUp("", "qwen2_5_vl_7b_geo3k_streaming")
    passes = modelled(
        replace(recipe, overrides=["algorithm.advantage_estimator=reinforce_plus_plus"]), tmp_path
    )
    assert passes.early() == pytest.approx(sum(passes.training().values()) - passes._update())
    serial = modelled(replace(recipe, overrides=["rollout.streaming=false"]), tmp_path)
    seconds = serial.seconds()
    total = seconds.pop("total")
    assert serial.early() == 0 and total == pytest.approx(sum(seconds.values()))
    even = modelled(recipe, tmp_path)
    even.server = replace(even.server, concurrency=1000)  # all at once, and all equally long
    even.step = replace(even.step, response=even.step.longest)
    one_batch = even.stream_end(10.0)
    assert 10.0 < one_batch - even.server.rollout_seconds(even.step, 128) < 12.0


@pytest.mark.slow
def test_published_runs_are_near_the_model_of_their_work(tmp_path: Path) -> None:
    """EasyR1's whole step, with prompts and images computed as often as it does; and of verl's the
    rollout, whose time includes loading the weights. Its update runs at an MFU of 2.5 %.
    """
    rows = {cells[0]: cells[1:] for cells in published(tmp_path)[1:]}
    model = float(rows["the model, with each prompt computed five times"][-1])
    assert 0.75 < model / 120 < 1.0
    assert 0.5 < float(published(tmp_path)[-1][1]) / 29 < 1.0


@pytest.mark.slow
def test_a_pipeline_has_bubbles(tmp_path: Path) -> None:
    """Twice as many packs in a pass halve their share: 3 of 16 or 32 packs on each data rank."""
    two, one = (
        StepModel(*resolved(replace(LARGE, overrides=keys), tmp_path), 64, 8).training()[
            "reference"
        ]
        for keys in ((), ("algorithm.minibatches=1",))
    )
    assert two / one == pytest.approx((1 + 3 / 32) / (1 + 3 / 64))

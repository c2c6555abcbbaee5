"""result.json, the reward curve, and the sentence about the gain."""

import json
from pathlib import Path

import pytest
from PIL import Image

from megavlm.observability.metrics import MetricsWriter
from megavlm.observability.plots import moving_mean, reward_curve
from megavlm.observability.result import (
    build_result,
    category_rows,
    conclude,
    final_reward,
    write_result,
)

from .runs import evaluation, measure, metrics, write_run


def test_the_result_is_put_together_from_the_files_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    result = build_result(
        tmp_path, steps=4, seed=7, extra_seconds={"export": 1.5}, paths={"run": "runs/x"}
    )
    written = json.loads(write_result(tmp_path, result).read_text())
    assert (written["accuracy_before"], written["accuracy_after"]) == (0.5, 0.9)
    assert written["accuracy_before_by_category"] == {"colour": 0.5, "count": 0.5}
    assert written["accuracy_after_by_category"] == {"colour": 0.9, "count": 0.9}
    assert written["seconds_by_phase"] == {
        "rollout": 2.0,
        "update": 4.0,
        "other": 2.0,
        "evaluation": 4.0,
        "export": 1.5,
    }
    assert (written["steps"], written["seed"], written["paths"]) == (4, 7, {"run": "runs/x"})
    assert written["gain_is_visual"] is True


def test_a_resumed_run_counts_whole(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    with MetricsWriter(tmp_path, 2) as writer:
        for step in (3, 4):
            writer.write(step, metrics(step))
        writer.write_evaluation(4, evaluation(0.8))
    result = build_result(tmp_path, steps=4, seed=0)
    assert (result["accuracy_before"], result["accuracy_after"]) == (0.5, 0.8)
    assert result["seconds_by_phase"]["update"] == 4.0


def test_only_an_evaluation_of_the_last_step_is_after(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    result = build_result(tmp_path, steps=5, seed=0)
    assert result["accuracy_after"] is None and result["accuracy_after_by_category"] == {}


def test_a_category_that_only_one_evaluation_has(tmp_path: Path) -> None:
    write_run(tmp_path, after=evaluation(0.9) | {"greedy": measure(count=0.9, new=0.7)})
    rows = {row.category: row for row in category_rows(build_result(tmp_path, steps=5, seed=0))}
    assert list(rows) == ["count", "new", "all"]
    assert rows["new"].before is None and rows["new"].after == 0.7


@pytest.mark.parametrize(
    ("before", "after", "is_visual", "says"),
    [
        (0.66, evaluation(0.95, shuffled=0.28), True, "rose by 29.0 points to 95.0 %; this is vis"),
        (0.66, evaluation(0.95, shuffled=0.355), True, "this is visual"),
        (0.66, evaluation(0.95, shuffled=0.37), False, "NOT shown to be visual"),
        (0.66, evaluation(0.60), False, "no gain: greedy accuracy went from 66.0 % to 60.0 %"),
        (0.66, evaluation(0.66), False, "no gain"),
        (0.66, evaluation(0.95, shuffled=None), None, "not measured"),
        (None, evaluation(0.95), True, "no evaluation at the start"),
        (
            0.66,
            evaluation(0.95) | {"failures": {"remote": 3}},
            True,
            "). 3 responses count as incorrect",
        ),
    ],
)
def test_the_sentence_about_the_gain(
    before: float | None, after: dict, is_visual: bool | None, says: str
) -> None:
    verdict, sentence = conclude(None if before is None else evaluation(before), after)
    assert verdict is is_visual and says in sentence


def test_without_an_evaluation_nothing_is_said() -> None:
    assert conclude(None, None) == (None, "")


def test_the_moving_mean_looks_back_only() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_reward_curve_is_a_image_with_both_series(tmp_path: Path) -> None:
    write_run(tmp_path)
    with Image.open(reward_curve(tmp_path)) as image:
        assert image.format == "PNG" and image.width >= 800
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24) or []}
    assert {(0x1F, 0x5F, 0xBF), (0xC2, 0x41, 0x0C)} <= colours


def test_the_reward_curve_of_a_run_without_rewards_is_empty_but_there(tmp_path: Path) -> None:
    with Image.open(reward_curve(tmp_path)) as image:
        assert image.format == "PNG"


def test_the_final_reward_is_of_the_last_hundred_episodes(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step, (reward, episodes) in enumerate([(0.0, 500), (0.5, 60), (1.0, 80)], 1):
            writer.write(step, {"reward": reward, "episodes": episodes})
        writer.write_evaluation(2, evaluation(0.7))
    result = build_result(tmp_path, steps=3, seed=0)
    assert result["final_reward"] == pytest.approx((80 * 1.0 + 20 * 0.5) / 100)
    assert (result["total_steps"], result["total_episodes"]) == (3, 640)
    assert result["metrics"] == str(tmp_path / "metrics.jsonl")
    assert result["evaluation"]["step"] == 2
    short = [{"reward": 0.25, "episodes": 8.0}, {"reward": None, "episodes": 8.0}]
    assert final_reward(short) == 0.25 and final_reward([{"loss": 1.0}]) is None


def test_supervised_runs_have_no_episodes(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    result = build_result(tmp_path, steps=1, seed=0)
    assert result["final_reward"] is None and result["total_episodes"] == 0
    assert result["evaluation"] is None


def test_a_gain_on_rows_without_answers_is_not_called_visual() -> None:
    after = evaluation(0.9) | {"blind": None, "valid": None}
    verdict, sentence = conclude(evaluation(0.4), after)
    assert verdict is None and "whether it is visual was not measured" in sentence

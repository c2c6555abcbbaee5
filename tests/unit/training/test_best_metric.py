"""What a checkpoint is compared by."""

import math

import pytest

from megavlm.training.best_metric import BestMetricTracker


def test_a_metric_of_the_steps_is_its_mean_since_the_last_checkpoint() -> None:
    score = BestMetricTracker("reward")
    assert score.take() == {}
    for value in (0.25, math.nan, 0.75):
        score.step({"reward": value, "loss": 9.0})
    assert score.take() == {"reward": 0.5}
    assert score.take() == {}
    score.step({"reward": 1.0})
    assert score.take() == {"reward": 1.0}


def test_an_evaluation_counts_for_the_step_that_it_evaluated() -> None:
    score = BestMetricTracker("evaluation/greedy")
    score.step({"reward": 1.0})
    score.evaluation({"evaluation/greedy": 0.5, "evaluation/valid": 1.0})
    assert score.take() == {"evaluation/greedy": 0.5}
    score.evaluation({"evaluation/greedy": 0.6})
    score.step({"reward": 1.0})
    assert score.take() == {}, "trained since"
    score.evaluation({"evaluation/valid": 1.0})
    assert score.take() == {}


def test_a_category_may_be_missing_from_a_step() -> None:
    score = BestMetricTracker("reward/count")
    score.step({"reward": 1.0, "reward/count": 0.5})
    score.step({"reward": 1.0})
    assert score.take() == {"reward/count": 0.5}


def test_an_unknown_metric_is_named_at_the_first_step() -> None:
    with pytest.raises(ValueError, match="rewrad is not measured by") as error:
        BestMetricTracker("rewrad").step({"loss": 1.0, "reward": 1.0, "seconds/data": 1.0})
    assert str(error.value).endswith("choose one of loss, reward")
    BestMetricTracker(None).step({"loss": 1.0})
    assert BestMetricTracker(None).take() == {}

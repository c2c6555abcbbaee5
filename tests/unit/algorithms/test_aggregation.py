"""The weights that make a sum over tokens each kind of mean; overlong shaping."""

import pytest

from megavlm.algorithms.aggregation import token_weights
from megavlm.algorithms.dapo import overlong_penalty

LENGTHS = [3, 1, 6, 2]
LOSSES = [[0.5, 1.0, -2.0], [3.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, -1.0]]


def total(aggregation: str, counted: list[bool]) -> float:
    weights = token_weights(LENGTHS, counted, aggregation, max_length=10)
    return sum(w * sum(loss) for w, loss in zip(weights, LOSSES, strict=True))


@pytest.mark.parametrize("counted", [[True] * 4, [True, False, True, True]])
def test_each_is_the_mean_that_it_is_named_for(counted: list[bool]) -> None:
    kept = [loss for loss, counts in zip(LOSSES, counted, strict=True) if counts]
    sums = [sum(loss) for loss in kept]
    assert total("token_mean", counted) == pytest.approx(sum(sums) / sum(map(len, kept)))
    means = [sum(loss) / len(loss) for loss in kept]
    assert total("sequence_mean", counted) == pytest.approx(sum(means) / len(kept))
    assert total("sequence_sum", counted) == pytest.approx(sum(sums) / len(kept))
    assert total("constant", counted) == pytest.approx(sum(sums) / (len(kept) * 10))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_where_nothing_counts_all_weights_are_zero(aggregation: str) -> None:
    assert token_weights(LENGTHS, [False] * 4, aggregation, 10) == [0.0] * 4


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (20, -1.0)]
)
def test_a_response_is_punished_within_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=16, buffer=4) == penalty

"""Estimators and tests against their definitions."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.evaluation.statistics import estimate, paired_test, pass_at_k

SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_counts_subsets(attempts: int, data: st.DataObject) -> None:
    """Of all ways to choose k of the attempts, the share that holds a correct one."""
    correct = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    subsets = list(combinations(range(attempts), k))
    share = sum(any(i < correct for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(attempts, correct, k) == pytest.approx(share)


def test_methods_follow_the_values() -> None:
    from scipy import stats

    right_or_wrong = estimate([1, 0, 1, 1])
    assert right_or_wrong.method == "wilson" and right_or_wrong.value == 0.75
    expected = stats.binomtest(3, 4).proportion_ci(method="wilson")
    assert right_or_wrong.interval == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert estimate([0.5, 0, 1, 1]).method == "bootstrap"
    assert paired_test([1, 0], [0, 0]).method == "mcnemar"
    assert paired_test([0.5, 0], [0, 0]).method == "sign_flip"


@given(SHARES)
def test_intervals_are_in_range_and_repeatable(values: list[float]) -> None:
    found = estimate(values)
    low, high = found.interval
    assert min(values) <= low <= high <= max(values) or found.method == "wilson"
    assert low - 1e-9 <= found.value <= high + 1e-9 or len(values) < 5
    assert estimate(values) == found


def test_bootstrap_agrees_with_the_normal_interval_of_many() -> None:
    values = np.random.default_rng(1).choice([0.0, 0.25, 0.75, 1.0], 2000)
    low, high = estimate(values.tolist()).interval
    error = 1.96 * values.std() / 2000**0.5
    assert (high - low) / 2 == pytest.approx(error, rel=0.1)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.003)


def test_the_sign_flip_test_agrees_with_all_flips() -> None:
    first, second = [0.5, 1.0, 0.25, 0.75, 1.0, 0.5], [0.25, 0.25, 0.25, 0.5, 0.5, 0.75]
    difference = np.subtract(first, second)
    flips = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1).T
    exact = (np.abs(flips @ difference) >= abs(difference.sum()) - 1e-12).mean()
    found = paired_test(first, second)
    assert found.p_value == pytest.approx(exact, abs=0.02)
    assert (found.first_better, found.second_better) == (4, 1)


@pytest.mark.parametrize("values", [[1.0, 0.0, 1.0], [0.5, 0.25, 1.0]])
def test_a_model_equals_itself(values: list[float]) -> None:
    found = paired_test(values, values)
    assert found.difference == 0 and found.p_value == 1 and found.interval == (0, 0)


def test_a_clear_difference_is_found() -> None:
    rng = np.random.default_rng(0)
    better, worse = rng.random(300) < 0.8, rng.random(300) < 0.5
    kinds: list[Any] = [(better, worse), (better * 0.5, worse * 0.5)]
    for first, second in kinds:
        found = paired_test(first.astype(float).tolist(), second.astype(float).tolist())
        assert found.p_value < 0.001 and found.interval[0] > 0

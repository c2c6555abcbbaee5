"""Group advantages and the filter on groups without signal."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.algorithms.advantages import group_advantages
from megavlm.algorithms.filters import has_signal

GROUPS = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=n, max_size=n),
        min_size=1,
        max_size=5,
    )
)


@given(GROUPS)
def test_equals_the_definition_in_plain_python(groups: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(groups, dtype=torch.float64), normalize_by_std=True)
    for group, actual in zip(groups, advantages.tolist(), strict=True):
        deviation = statistics.stdev(group)
        expected = [(r - statistics.mean(group)) / deviation if deviation else 0.0 for r in group]
        assert actual == pytest.approx(expected, abs=1e-4)


def test_without_normalisation_it_is_the_distance_from_the_mean() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_by_std=False)
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(normalize: bool, n: int) -> None:
    # The mean of three 0.1 is not 0.1 in float32: the difference must not be blown up.
    rewards = torch.full((2, n), 0.1)
    assert torch.equal(group_advantages(rewards, normalize), torch.zeros(2, n))


def test_one_group_does_not_touch_another() -> None:
    together = group_advantages(torch.tensor([[0.0, 1.0], [5.0, 5.0]]), normalize_by_std=True)
    alone = group_advantages(torch.tensor([[0.0, 1.0]]), normalize_by_std=True)
    assert torch.equal(together, torch.cat([alone, torch.zeros(1, 2)]))


def test_signal_is_a_difference_within_the_group() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.1, 0.0]])
    assert has_signal(rewards).tolist() == [False, False, True]

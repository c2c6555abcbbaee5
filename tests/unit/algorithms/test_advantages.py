"""Advantages relative to a group, whitening, and the filter on groups without signal."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.algorithms.advantages import AdvantageInputs
from megavlm.algorithms.grpo import differs, group_relative, leave_one_out
from megavlm.algorithms.reinforce_plus_plus import reinforce_plus_plus
from megavlm.algorithms.whitening import whiten
from megavlm.config.algorithm import GRPO

# Groups of unequal size, 1 included.
GROUPS = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5
)


def flat(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and group numbers, the responses of the groups mixed."""
    pairs = [(reward, number) for number, group in enumerate(groups) for reward in group]
    order = sorted(range(len(pairs)), key=lambda index: (index * 7) % 11)
    rewards, numbers = zip(*(pairs[index] for index in order), strict=True)
    return torch.tensor(rewards), torch.tensor(numbers)


@given(GROUPS)
def test_grpo_equals_its_definition(groups: list[list[float]]) -> None:
    rewards, numbers = flat(groups)
    made = group_relative(rewards, numbers, normalize_by_std=True)
    plain = group_relative(rewards, numbers, normalize_by_std=False)
    for reward, number, normalized, centred in zip(
        rewards.tolist(), numbers.tolist(), made.tolist(), plain.tolist(), strict=True
    ):
        group = groups[number]
        deviation = statistics.stdev(group) if len(group) > 1 else 0.0
        distance = reward - statistics.mean(group)
        assert centred == pytest.approx(distance, abs=1e-6)
        assert normalized == pytest.approx(distance / deviation if deviation else 0.0, abs=1e-4)


@given(GROUPS)
def test_rloo_equals_its_definition(groups: list[list[float]]) -> None:
    rewards, numbers = flat(groups)
    for reward, number, made in zip(
        rewards.tolist(), numbers.tolist(), leave_one_out(rewards, numbers).tolist(), strict=True
    ):
        group = groups[number]
        others = (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else reward
        assert made == pytest.approx(reward - others, abs=1e-6)


@given(GROUPS, st.integers(0, 2**12))
def test_what_is_not_counted_is_as_if_it_were_not_there(
    groups: list[list[float]], mask: int
) -> None:
    rewards, numbers = flat(groups)
    counted = torch.tensor([bool(mask >> (index % 12) & 1) for index in range(len(rewards))])
    kept, kept_numbers = rewards[counted], numbers[counted]
    for estimate in (
        lambda r, g, **k: group_relative(r, g, normalize_by_std=True, **k),
        lambda r, g, **k: group_relative(r, g, normalize_by_std=False, **k),
        leave_one_out,
    ):
        made = estimate(rewards, numbers, counted=counted)
        assert not made[~counted].any()
        if len(kept):
            renumbered = kept_numbers.unique(return_inverse=True)[1]
            torch.testing.assert_close(made[counted], estimate(kept, renumbered))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(n: int) -> None:
    # The mean of three 0.1 is not 0.1 in float32: the difference must not be blown up.
    rewards, groups = torch.full((2 * n,), 0.1), torch.arange(2).repeat_interleave(n)
    zero = torch.zeros(2 * n)
    assert torch.equal(group_relative(rewards, groups, normalize_by_std=True), zero)
    assert torch.equal(group_relative(rewards, groups, normalize_by_std=False), zero)
    assert torch.equal(leave_one_out(rewards, groups), zero)
    assert torch.equal(whiten(rewards, torch.ones(2 * n, dtype=torch.bool)), zero)


def test_one_group_does_not_touch_another() -> None:
    together = group_relative(
        torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), normalize_by_std=True
    )
    alone = group_relative(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), normalize_by_std=True)
    assert torch.equal(together, torch.cat([alone, torch.zeros(2)]))


def test_whitening_has_mean_zero_and_deviation_one_over_what_is_counted() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3 + 2
    counted = torch.arange(50) % 5 != 0
    made = whiten(values, counted)
    kept = values[counted].tolist()
    mean, deviation = statistics.mean(kept), statistics.stdev(kept)
    for value, actual in zip(values.tolist(), made.tolist(), strict=True):
        assert actual == pytest.approx((value - mean) / deviation, abs=1e-5)


def test_returns_to_go_are_what_is_still_to_come() -> None:
    rewards = torch.tensor([-0.1, -0.2, 0.7, 1.0])
    inputs = AdvantageInputs(
        rewards=rewards,
        sequence_ids=torch.tensor([0, 0, 0, 1]),
        group_ids=torch.zeros(2, dtype=torch.long),
        has_reward=torch.ones(2, dtype=torch.bool),
    )
    made = reinforce_plus_plus(inputs, GRPO())
    torch.testing.assert_close(made, torch.tensor([0.4, 0.5, 0.7, 1.0]))


def test_signal_is_a_difference_within_the_group_beyond_rounding() -> None:
    cases = {
        (0.0, 0.0, 0.0): False,
        (1.0, 1.0, 1.0): False,
        (0.0, 0.1, 0.0): True,
        (0.0, 1e-5, 0.0): True,
        (0.3, 0.1 + 0.2, 0.3): False,
        (0.0, 0.1 + 0.2 - 0.3, 0.0): False,
        (1000.0, 1000.0 + 2**-14, 1000.0): False,  # a step of float32
        (1000.0, 1000.01, 1000.0): True,
    }
    rewards = torch.tensor(list(cases), dtype=torch.float64).flatten()
    for made in (rewards, rewards.float()):
        found = differs(made, torch.arange(len(cases)).repeat_interleave(3))
        assert found.view(-1, 3).any(1).tolist() == list(cases.values())

"""Generalised advantage estimation against loops, over tokens and over turns."""

import pytest
import torch

from megavlm.algorithms.gae import gae, turn_gae
from tests.unit.algorithms.literal import ROW, row

IDS, TURNS = torch.tensor(ROW.ids), torch.tensor(ROW.turns)
REWARDS, VALUES = ROW.draw(1), ROW.draw(2)


def loop(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Of one sequence."""
    advantages, carried, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + gamma * after - value + gamma * lam * carried
        after = value
        advantages.insert(0, carried)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.9, 0.7)])
def test_over_tokens(gamma: float, lam: float) -> None:
    advantages, returns = gae(row(REWARDS), row(VALUES), IDS, gamma=gamma, lam=lam)
    for places in ROW.sequences():
        expected = loop([REWARDS[p] for p in places], [VALUES[p] for p in places], gamma, lam)
        torch.testing.assert_close(advantages[places], row(expected[0]))
        torch.testing.assert_close(returns[places], row(expected[1]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_over_turns(gamma: float, lam: float) -> None:
    advantages, returns = turn_gae(row(REWARDS), row(VALUES), IDS, TURNS, gamma=gamma, lam=lam)
    for places in ROW.sequences():
        turns: dict[int, list[int]] = {}
        for place in places:
            turns.setdefault(ROW.turns[place], []).append(place)
        expected = loop(
            [sum(REWARDS[p] for p in turn) for turn in turns.values()],
            [VALUES[turn[0]] for turn in turns.values()],
            gamma,
            lam,
        )
        for number, turn in enumerate(turns.values()):
            for place in turn:
                assert advantages[place].item() == pytest.approx(expected[0][number])
                assert returns[place].item() == pytest.approx(expected[1][number])


def test_a_response_of_one_turn_with_lambda_one_is_reward_less_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.5, 0.9])
    ids = torch.zeros(3, dtype=torch.int64)
    advantages, returns = gae(rewards, values, ids, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, 1.0 - values)
    torch.testing.assert_close(returns, torch.ones(3))


def test_no_tokens() -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(empty, empty, none, gamma=1.0, lam=1.0)[0].shape == (0,)
    assert turn_gae(empty, empty, none, none, gamma=1.0, lam=1.0)[0].shape == (0,)

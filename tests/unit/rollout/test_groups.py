"""Dynamic sampling of groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.rollout.groups import sample


class Prompts:
    """Groups of two rewards each, in a given order; what was asked for."""

    def __init__(self, rewards: list[tuple[float, float]]) -> None:
        self.rewards, self.asked = iter(rewards), list[int]()

    def roll_out(self, count: int) -> list[Any]:
        self.asked.append(count)
        return [
            SimpleNamespace(
                scores=[SimpleNamespace(reward=r, skipped=False) for r in next(self.rewards)]
            )
            for _ in range(count)
        ]


def rewards(groups: Any) -> list[tuple[float, ...]]:
    return [tuple(score.reward for score in group.scores) for group in groups]


FLAT, ALL_RIGHT, TEACHES = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)


def test_without_rounds_groups_are_taken_as_they_come() -> None:
    prompts = Prompts([FLAT, TEACHES])
    sampled = sample(prompts.roll_out, 2, further_rounds=0)
    assert rewards(sampled.kept) == rewards(sampled.everything) == [FLAT, TEACHES]


def test_groups_without_signal_make_way_for_further_prompts() -> None:
    prompts = Prompts([FLAT, TEACHES, ALL_RIGHT, FLAT, TEACHES, (1.0, 0.0)])
    sampled = sample(prompts.roll_out, 3, further_rounds=9)
    assert prompts.asked == [3, 2, 1], "only what is missing"
    assert rewards(sampled.kept) == [TEACHES, TEACHES, (1.0, 0.0)]
    assert len(sampled.everything) == 6


@pytest.mark.parametrize("rounds", [1, 4])
def test_it_ends_where_nothing_teaches_and_a_step_has_all_its_groups(rounds: int) -> None:
    prompts = Prompts([FLAT] * 99)
    sampled = sample(prompts.roll_out, 4, further_rounds=rounds)
    assert prompts.asked == [4] * (1 + rounds)
    assert rewards(sampled.kept) == [FLAT] * 4

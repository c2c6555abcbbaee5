"""Dynamic sampling: which groups a step rolls out, and which it trains on."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.config.algorithm import GRPO
from megavlm.inference.protocol import Sampling
from megavlm.training.policy_trainer import PolicyTrainer


class Rollouts:
    """Driver whose groups have two rewards each, in a given order."""

    def __init__(self, rewards: list[tuple[float, float]]) -> None:
        self.rewards, self.counts = iter(rewards), list[int]()
        self.client = SimpleNamespace(generate=print)
        self.stream = SimpleNamespace(take=None)
        self.producer, self.times_out = None, 0  # groups, of those that are played first
        self.partial_rollouts: Any = self
        self.episode_runner: Any = self

    def take(self, count: int, draw: Any) -> list[Any]:
        self.counts.append(count)
        return [
            SimpleNamespace(
                scores=[SimpleNamespace(reward=r, skipped=False) for r in next(self.rewards)]
            )
            for _ in range(count)
        ]

    def start_groups(self, groups: list[Any], n: int, step: int) -> list[Any]:
        return groups

    def play(self, groups: list[Any], generate: Any, **options: Any) -> None:
        assert options["enough"] == len(groups)

    def split(self, groups: list[Any]) -> list[Any]:
        self.times_out, lost = 0, self.times_out
        return groups[lost:]


def sample(rollouts: Rollouts, wanted: int, further_rounds: int) -> tuple[list[Any], list[Any]]:
    """Return the rewards of all groups, and of those that are trained on."""
    trainer: Any = PolicyTrainer.__new__(PolicyTrainer)
    trainer.settings = GRPO(prompts_per_step=wanted, dynamic_sampling=further_rounds)
    settings = {"oversample": 1.0, "lora": "merged", "pause": "abort", "timed_out": "drop"}
    config = SimpleNamespace(rollout=SimpleNamespace(**settings))
    trainer.train_state = SimpleNamespace(config=config, step=0, phases=lambda _: nullcontext())
    trainer.driver, trainer.sampling = rollouts, Sampling(1.0, 4)
    trainer.weights = SimpleNamespace(refit=None)
    sampled = trainer.sample()
    return rewards(sampled), rewards(trainer.select(sampled))


def rewards(groups: Any) -> list[tuple[float, ...]]:
    return [tuple(score.reward for score in group.scores) for group in groups]


FLAT, ALL_RIGHT, TEACHES = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)


def test_without_rounds_groups_are_taken_as_they_come() -> None:
    sampled, kept = sample(Rollouts([FLAT, TEACHES]), 2, 0)
    assert kept == sampled == [FLAT, TEACHES]


def test_groups_without_signal_make_way_for_further_prompts() -> None:
    rollouts = Rollouts([FLAT, TEACHES, ALL_RIGHT, FLAT, TEACHES, (1.0, 0.0)])
    sampled, kept = sample(rollouts, 3, 9)
    assert rollouts.counts == [3, 2, 1], "only what is missing"
    assert kept == [TEACHES, TEACHES, (1.0, 0.0)]
    assert len(sampled) == 6


@pytest.mark.parametrize("rounds", [1, 4])
def test_it_ends_where_nothing_teaches_and_a_step_has_all_its_groups(rounds: int) -> None:
    rollouts = Rollouts([FLAT] * 99)
    _, kept = sample(rollouts, 4, rounds)
    assert rollouts.counts == [4] * (1 + rounds)
    assert kept == [FLAT] * 4


def test_groups_that_time_out_are_replaced_in_their_round() -> None:
    rollouts = Rollouts([TEACHES, FLAT, (1.0, 0.0), TEACHES])
    rollouts.times_out = 1
    _, kept = sample(rollouts, 3, 0)
    assert rollouts.counts == [3, 1] and kept == [FLAT, (1.0, 0.0), TEACHES]

"""Stages by step and by reward, and a curriculum that is resumed where it was."""

import pytest

from megavlm.environments.curriculum import Curriculum, Term
from megavlm.rewards.manager import Stage

STAGES = [Stage({"country": 1.0}, tolerance) for tolerance in (500.0, 200.0, 25.0)]


def by_step() -> Curriculum:
    return Curriculum([Term(STAGES[0], 100), Term(STAGES[1], 300), Term(STAGES[2])], window=2)


def by_reward() -> Curriculum:
    terms = [Term(STAGES[0], reward=0.5), Term(STAGES[1], 9, 0.5), Term(STAGES[2])]
    return Curriculum(terms, window=2)


def test_stages_by_step() -> None:
    curriculum = by_step()
    seen = [curriculum.stage(step) for step in (0, 99, 100, 299, 300, 5000)]
    assert seen == [STAGES[i] for i in (0, 0, 1, 1, 2, 2)]
    assert by_step().stage(400) == STAGES[2], "two stages end at once"


def test_promotion_needs_a_whole_window_of_reward() -> None:
    curriculum = by_reward()
    for reward, number in ((0.9, 0), (0.0, 0), (0.9, 0), (0.2, 1), (0.9, 1), (0.9, 2), (1.0, 2)):
        curriculum.stage(1)
        curriculum.record(reward)
        assert curriculum.number == number
    assert curriculum.stage(1) == STAGES[2]


def test_a_step_ends_a_stage_that_reward_did_not() -> None:
    curriculum = by_reward()
    curriculum.record(0.5)
    curriculum.record(0.5)
    assert (curriculum.stage(3), curriculum.stage(9)) == (STAGES[1], STAGES[2])


def test_it_is_resumed_where_it_was() -> None:
    whole, first, second = by_reward(), by_reward(), by_reward()
    rewards = [0.2, 0.7, 0.4, 0.6, 0.3, 0.7]
    for step, reward in enumerate(rewards):
        whole.stage(step)
        whole.record(reward)
    for step, reward in enumerate(rewards[:3]):
        first.stage(step)
        first.record(reward)
    second.load_state_dict(first.state_dict())
    for step, reward in enumerate(rewards[3:], 3):
        second.stage(step)
        second.record(reward)
    assert second.state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match=r"curriculum.stages: the checkpoint is in stage 2"):
        Curriculum([], 2).load_state_dict({"stage": 1, "rewards": []})


def test_none_is_none() -> None:
    curriculum = Curriculum([], 2)
    curriculum.record(1.0)
    assert curriculum.stage(7) is None

"""Stages by step and by reward, and a curriculum that is resumed where it was."""

from typing import Any

import pytest

from megavlm.config.curriculum import CurriculumConfig, CurriculumStage
from megavlm.environments.curriculum import Curriculum


def curriculum_of(*ends: dict[str, Any]) -> Curriculum:
    """Return a curriculum of three tolerances; `ends`: when the first two stages end."""
    stages = [
        CurriculumStage(weights={"country": 1.0}, tolerance=tolerance, **end)
        for tolerance, end in zip((500.0, 200.0, 25.0), [*ends, {}], strict=True)
    ]
    return Curriculum(CurriculumConfig(stages=stages, window=2))


def by_step() -> Curriculum:
    return curriculum_of({"until": 100}, {"until": 300})


def by_reward() -> Curriculum:
    return curriculum_of({"reward": 0.5}, {"until": 9, "reward": 0.5})


def tolerance_of(stage: CurriculumStage | None) -> float | None:
    return None if stage is None else stage.tolerance


def test_stages_by_step() -> None:
    curriculum = by_step()
    seen = [tolerance_of(curriculum.stage(step)) for step in (0, 99, 100, 299, 300, 5000)]
    assert seen == [500.0, 500.0, 200.0, 200.0, 25.0, 25.0]
    assert tolerance_of(by_step().stage(400)) == 25.0, "two stages end at once"


def test_promotion_needs_a_whole_window_of_reward() -> None:
    curriculum = by_reward()
    for reward, number in ((0.9, 0), (0.0, 0), (0.9, 0), (0.2, 1), (0.9, 1), (0.9, 2), (1.0, 2)):
        curriculum.stage(1)
        curriculum.record(reward)
        assert curriculum.number == number
    assert tolerance_of(curriculum.stage(1)) == 25.0


def test_a_mean_is_reached_as_sums_round() -> None:
    curriculum = curriculum_of({"reward": 0.15}, {})
    reward = 0.7 - 0.6 + 0.05
    assert reward < 0.15
    for _ in range(2):
        curriculum.record(reward)
    assert curriculum.number == 1


def test_a_step_ends_a_stage_that_reward_did_not() -> None:
    curriculum = by_reward()
    curriculum.record(0.5)
    curriculum.record(0.5)
    assert [tolerance_of(curriculum.stage(step)) for step in (3, 9)] == [200.0, 25.0]


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
        Curriculum(CurriculumConfig(window=2)).load_state_dict({"stage": 1, "rewards": []})


def test_none_is_none() -> None:
    curriculum = Curriculum(CurriculumConfig(window=2))
    curriculum.record(1.0)
    assert curriculum.stage(7) is None

"""Rewards of a whole group in played episodes: when they are asked, and what they add to."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megavlm.config.curriculum import CurriculumStage
from megavlm.config.reward import Reward
from megavlm.data.processor import Processor
from megavlm.inference.requests import RequestTimedOut
from megavlm.rewards.base import RewardStop
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rollout.trajectory import Group
from tests.support.timeouts import scaled
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, play

RIGHT, RANK = Part("right", "vqa"), Part("rank", "group_rewards:rank", 0.1)
TWO_TURNS: dict[str, Any] = {"max_turns": 2, "max_observation_tokens": 64}


def make(*parts: Part, **settings: Any) -> RewardManager:
    return RewardManager(parts, Reward(workers=1, timeout=scaled(30), memory_mb=1024, **settings))


@pytest.fixture(scope="module")
def ranking() -> Iterator[RewardManager]:
    manager = make(RIGHT, RANK)
    yield manager
    asyncio.run(manager.close())


def test_the_reward_of_a_group_is_added_to_each_response(
    processor: Processor, ranking: RewardManager
) -> None:
    episodes = play(processor, ranking, Policy(processor, "3", "4", "2"), "vqa", n=3)
    assert [e.score.reward for e in episodes] == pytest.approx([1.1, 0.2, 0.0])
    assert [e.score.correct for e in episodes] == [True, False, False]
    assert dict(episodes[1].score.parts) == {"right": 0.0, "right/number": 0.0, "rank": 2.0}
    assert [e.rewards for e in episodes] == [[e.score.reward] for e in episodes]


def test_a_group_of_episodes_is_scored_by_their_last_turns(
    processor: Processor, ranking: RewardManager
) -> None:
    policy = Policy(processor, "5", "3", "4", "3", "1")  # the first and the third try again
    episodes = play(processor, ranking, policy, "vqa_retry", n=3, **TWO_TURNS)
    turns = [(e.texts[-1], len(e.texts)) for e in episodes]
    ranks = [sorted(text for text, _ in turns).index(text) for text, _ in turns]
    assert [count for _, count in turns] == [2, 1, 2]
    for episode, rank in zip(episodes, ranks, strict=True):
        (*before, last), right = episode.rewards, episode.score.parts["right"]
        worth = 0.5 ** len(before)
        assert before == [0.0] * len(before) and last == pytest.approx(worth * right + 0.1 * rank)
        assert episode.score.reward == last


def test_an_environment_that_scores_itself_gets_the_group_s_reward_at_the_end(
    processor: Processor,
) -> None:
    manager = make(RANK)
    episodes = play(processor, manager, Policy(processor, "3", "4"), "group_rewards:Own")
    asyncio.run(manager.close())
    assert [e.score.reward for e in episodes] == pytest.approx([0.25, 0.35])


def test_a_group_whose_request_times_out_is_not_scored(
    processor: Processor, ranking: RewardManager
) -> None:
    class Unanswered(Policy):
        async def ask(self, prompt: Any, **_: Any) -> Any:
            raise RequestTimedOut("no answer")

    policy = Unanswered(processor, "5", "3")
    first, second = play(processor, ranking, policy, "vqa_retry", **TWO_TURNS)
    assert not first.has_ended and second.score.reward == 1.0


def test_a_group_that_waits_is_scored_when_it_is_played(
    processor: Processor, ranking: RewardManager
) -> None:
    """Its first step plays another group; a later step continues its responses."""
    policy = Policy(processor, "3", "4", "4", "3")

    async def generate(prompts: Any, n: int, groups: Any, on_complete: Any) -> None:
        for group in groups:
            group[:] = [policy.respond() for _ in range(n)]
        await policy.on_complete([groups[0], *[[] for _ in groups[1:]]], on_complete)
        for group in groups[1:]:
            group[:] = [replace(response, finish="abort") for response in group]

    playing = episode_runner(processor, ranking, "vqa")
    groups = [Group(processor.prompt(ROW)) for _ in range(2)]
    RUNNER.run(playing.play(RUNNER.run(playing.start(groups, 2)), generate))
    assert [group.is_played for group in groups] == [True, False]
    assert [score.reward for score in groups[0].scores] == pytest.approx([1.0, 0.1])
    assert [r.finish for r in groups[1].responses] == ["abort", "abort"]

    policy.texts = ["4", "3"]
    RUNNER.run(playing.play(RUNNER.run(playing.start(groups[1:], 2)), generate))
    assert [score.reward for score in groups[1].scores] == pytest.approx([0.1, 1.0])
    RUNNER.run(playing._environments.close())


def test_the_curriculum_s_stage_reaches_the_group(
    processor: Processor, ranking: RewardManager
) -> None:
    playing, group = episode_runner(processor, ranking, "vqa"), Group(processor.prompt(ROW))
    stage = CurriculumStage(weights={"right": 0.0, "rank": 1.0})
    RUNNER.run(
        playing.play(
            RUNNER.run(playing.start([group], 2, stage=stage)), Policy(processor, "3", "4")
        )
    )
    RUNNER.run(playing._environments.close())
    assert [score.reward for score in group.scores] == [0.0, 1.0]


def test_a_reward_that_fails_replaces_what_the_last_turn_got(processor: Processor) -> None:
    broken = Part("broken", "group_rewards:broken")
    manager = make(RIGHT, broken, failure_value=-1.0)
    episodes = play(processor, manager, Policy(processor, "3", "4"), "vqa")
    asyncio.run(manager.close())
    assert [e.score.reward for e in episodes] == [-1.0, -1.0]
    assert manager.failures == {"exception": 2}
    stops = make(RIGHT, broken, on_failure="stop")
    with pytest.raises(RewardStop, match="as told"):
        play(processor, stops, Policy(processor, "3", "4"), "vqa")
    asyncio.run(stops.close())


def test_a_response_that_has_failed_keeps_its_score(processor: Processor) -> None:
    manager = make(Part("fails", "group_rewards:fails_for_four"), RANK, failure_value=-1.0)
    episodes = play(processor, manager, Policy(processor, "3", "4"), "vqa")
    asyncio.run(manager.close())
    assert [e.score.reward for e in episodes] == [1.0, -1.0]
    assert [e.score.failure for e in episodes] == [None, "exception"]


def test_the_turns_of_an_episode_are_told_with_each_score(processor: Processor) -> None:
    manager = make(Part("only", "group_rewards:by_turn"))
    policy = Policy(processor, "5", "4")
    (episode,) = play(processor, manager, policy, "vqa_retry", n=1, **TWO_TURNS)
    asyncio.run(manager.close())
    assert dict(episode.score.parts) == {
        "turns": 2.0,
        "tokens": float(sum(episode.responses[-1].token_ids)),
        "stop": 1.0,
    }

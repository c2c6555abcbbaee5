"""Rewards of a whole group, and what a reward may ask for besides the response and its row."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megavlm.config.curriculum import CurriculumStage
from megavlm.config.reward import Reward
from megavlm.rewards.base import Example, ResponseDetails, RewardStop, Score
from megavlm.rewards.manager import Part, RewardManager
from tests.support.timeouts import scaled

EXAMPLE = Example("?", "red", images=(b"red",))
DETAILS = [
    ResponseDetails("stop", ("so", "b"), (1, 2)),
    ResponseDetails("length", ("a",), (5,)),
    ResponseDetails("stop", ("c",), ()),
]
TEXTS = ["b", "a", "c"]
ZERO = [Score(0.0, False)] * 3
FAULTY = [Part("only", "user_rewards:faulty_group")]


def make(parts: Sequence[Part], **settings: Any) -> RewardManager:
    return RewardManager(parts, Reward(workers=2, timeout=scaled(30), memory_mb=1024, **settings))


def score_group(
    parts: Sequence[Part],
    texts: Sequence[str] = TEXTS,
    known: Sequence[Score] = ZERO,
    stage: CurriculumStage | None = None,
    **settings: Any,
) -> list[Score]:
    manager = make(parts, **settings)

    async def run() -> list[Score]:
        try:
            return await manager.score_group(texts, DETAILS, known, EXAMPLE, stage)
        finally:
            await manager.close()

    return asyncio.run(run())


def test_a_group_is_ranked_in_one_call() -> None:
    found = score_group([Part("rank", "user_rewards:ranks", 0.5, {"step": 2.0})])
    assert found == [Score(1.0, True), Score(0.0, False), Score(2.0, True)]


def test_a_group_s_reward_is_a_part_and_the_first_part_decides_what_is_correct() -> None:
    right, rank = Part("right", "exact_match"), Part("rank", "user_rewards:ranks", 0.5)
    known = [Score(1.0, True, {"right": 1.0}), *ZERO[1:]]
    found = score_group([right, rank], known=known)
    assert found[0] == Score(0.5, True, {"right": 1.0, "rank": 1.0})
    assert found[2] == Score(1.0, False, {"rank": 2.0})
    assert [score.correct for score in score_group([rank, right], known=known)] == [1, 0, 1]
    stage = CurriculumStage(weights={"rank": 10.0})
    assert score_group([right, rank], known=known, stage=stage)[2].reward == 20.0


def test_a_response_alone_is_scored_by_the_other_parts() -> None:
    manager = make([Part("rank", "user_rewards:ranks"), Part("right", "exact_match", 2.0)])
    assert manager.scores_groups
    assert asyncio.run(manager.score("red", EXAMPLE)) == Score(2.0, False, {"right": 1.0})
    asyncio.run(manager.close())
    manager = make([Part("rank", "user_rewards:ranks")])
    assert asyncio.run(manager.score("red", EXAMPLE)) == Score(0.0, False)
    asyncio.run(manager.close())


def test_a_reward_gets_what_its_parameters_ask_for() -> None:
    manager = make([Part("asks", "user_rewards:asks")])
    assert not manager.scores_groups
    found = asyncio.run(manager.score("a", EXAMPLE, details=DETAILS[1]))
    assert found == Score(1.0, True, {"turns": 1.0, "last": 1.0, "tokens": 5.0})
    asyncio.run(manager.close())


def test_an_async_reward_of_a_group_gets_a_list_of_each() -> None:
    found = score_group([Part("asks", "user_rewards:asks_of_a_group")])
    assert [dict(score.parts) for score in found] == [
        {"turns": 2.0, "tokens": 3.0, "cut": 0.0},
        {"turns": 1.0, "tokens": 5.0, "cut": 1.0},
        {"turns": 1.0, "tokens": 0.0, "cut": 0.0},
    ]
    assert all(score.correct for score in found), "the images are the row's"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("short", "it returned 1 values for a group of 3 responses: return a list"),
        ("number", "it returned 1.0 for a group of 3 responses: return a list"),
        ("mapping", "it returned {'mapping': 1.0"),
        ("text", "it returned 'good', but that is not a number"),
        ("raise", "KeyError: 'as told'"),
    ],
)
def test_a_reward_that_fails_is_told_by_its_fault(fault: str, problem: str) -> None:
    with pytest.raises(RewardStop, match=problem):
        score_group(FAULTY, [fault, "a", "c"], on_failure="stop")


@pytest.mark.parametrize(("fault", "kind"), [("raise", "exception"), ("infinite", "value")])
def test_a_reward_that_fails_fails_for_the_whole_group(fault: str, kind: str) -> None:
    found = score_group(FAULTY, [fault, "a", "c"], failure_value=-1.0, on_failure="skip")
    assert found == [Score(-1.0, False, failure=kind, skipped=True)] * 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [("both", "responses and response"), ("half", "responses and no rows")],
)
def test_a_reward_of_a_response_and_a_group_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"it has the parameter {problem}: a reward takes"):
        make([Part("only", f"user_rewards:{name}")])

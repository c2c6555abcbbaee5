"""Several rewards, their weights, and what a curriculum's stage changes of them."""

import asyncio
from collections.abc import Sequence

import pytest

from megavlm.config.curriculum import CurriculumStage
from megavlm.config.reward import Reward
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import Part, RewardManager
from tests.support.timeouts import scaled

EXAMPLE = Example("?", "red", images=(b"red",))


def score(parts: Sequence[Part], response: str, stage: CurriculumStage | None = None) -> Score:
    async def run() -> Score:
        manager = RewardManager(
            parts, Reward(on_failure="zero", workers=2, timeout=scaled(30), memory_mb=1024)
        )
        try:
            return await manager.score(response, EXAMPLE, stage)
        finally:
            await manager.close()

    return asyncio.run(run())


def test_rewards_are_weighted_and_kept_apart() -> None:
    parts = [
        Part("right", "exact_match", 2.0),
        Part("size", "user_rewards:length", 0.5, {"factor": 3.0}),
        Part("seen", "user_rewards:looks", -1.0),
    ]
    assert score(parts, "red") == Score(
        2.0 + 1.5 - 0.5, True, {"right": 1.0, "size": 3.0, "seen": 0.5, "seen/seen": 1.0}
    )
    assert score(parts, "blue").correct is False, "the first reward says what is correct"


def test_a_function_gets_images_and_options() -> None:
    found = score([Part("seen", "user_rewards:looks", 2.0)], "red")
    assert found == Score(1.0, True, {"seen": 1.0})
    assert score([Part("size", "user_rewards:length")], "redred") == Score(2.0, True)


def test_a_function_with_any_options_gets_those_of_the_recipe_and_the_stage() -> None:
    part = Part("sum", "user_rewards:anything", options={"a": 1.5, "b": 2})
    assert score([part], "red").reward == 3.5
    assert score([part], "red", CurriculumStage(tolerance=8.0)).reward == 11.5


def test_a_reward_is_correct_from_1_as_sums_round() -> None:
    for reward, is_correct in ((0.7 + 0.2 + 0.1, True), (0.9999, False)):
        part = Part("sum", "user_rewards:anything", options={"a": reward})
        assert score([part], "red") == Score(reward, is_correct)


@pytest.mark.parametrize("name", ["later", "LATER"])
def test_an_async_function_is_awaited(name: str) -> None:
    assert score([Part("later", f"user_rewards:{name}")], "red").reward == 1.0


def test_a_stage_changes_weights_and_tolerance() -> None:
    parts = [Part("right", "exact_match"), Part("close", "user_rewards:tolerant")]
    stage = CurriculumStage(weights={"close": 0.5}, tolerance=8.0)
    assert score(parts, "red", stage).reward == 1.0 + 0.5 * 8.0
    assert score(parts, "red").reward == 1.0 + 1.0
    place = CurriculumStage(weights={"country": 1.0}, tolerance=8.0)
    only = [Part("place", "geospot")]
    assert score(only, "red", place) == Score(1.0, True, {"country": 1.0})


def test_an_unknown_option_is_refused() -> None:
    unknown = (
        r"reward\.parts\.size\.options\.factr: user_rewards:length takes no such option; .*factor"
    )
    key = "reward.parts.size.options"
    with pytest.raises(ValueError, match=unknown):
        score([Part("size", "user_rewards:length", options={"factr": 1}, key=key)], "red")
    with pytest.raises(ValueError, match=r"reward\.options: .* no component 'town'"):
        score([Part("place", "geospot", options={"weights": {"town": 1.0}})], "red")


def test_a_stage_that_no_reward_can_keep_is_refused() -> None:
    judges = [
        (
            Part("a", "exact_match"),
            CurriculumStage(tolerance=3.0),
            "tolerance given, but exact_match",
        ),
        (
            Part("a", "vqa"),
            CurriculumStage(weights={"country": 1.0}),
            "weights given, but vqa has none",
        ),
        (Part("a", "geospot"), CurriculumStage(weights={"contry": 1.0}), "no component 'contry'"),
    ]
    for part, stage, problem in judges:
        manager = RewardManager(
            [part], Reward(on_failure="zero", workers=1, timeout=scaled(30), memory_mb=1024)
        )
        with pytest.raises(ValueError, match=problem):
            manager.check(stage)
        asyncio.run(manager.close())

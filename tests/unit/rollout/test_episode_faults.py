"""What happens to faults of a user's environment, of rewards, and to prompts that cannot start."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megavlm.config.reward import Reward
from megavlm.data.processor import Processor, Prompt
from megavlm.environments.base import Step
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Example, RewardStop, Score
from megavlm.rewards.manager import RewardManager
from megavlm.rollout import episodes
from megavlm.rollout.timed_environment import step_score
from megavlm.rollout.trajectory import Group
from megavlm.subprocess_pool.failure import CallFailure
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, fails, graded, play

FAULTY = "user_environments:Faulty"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raise", "exception"),
        ("hang", "timeout"),
        ("parts", "exception"),
        ("image", "value"),
        ("counts", "exception"),
        ("endless counts", "value"),
        ("no content", "exception"),
        ("mixed", "exception"),
    ],
)
def test_a_step_that_fails_is_scored_by_policy(
    processor: Processor, manager: RewardManager, fault: str, kind: str
) -> None:
    timeout = 1.0 if kind == "timeout" else 30.0
    settings: dict[str, Any] = {"options": {"fault": fault}, "timeout": timeout, "max_turns": 2}
    policy = Policy(processor, "3")
    (episode,) = play(processor, manager, policy, FAULTY, n=1, memory_mb=1024, **settings)
    assert (episode.score.reward, episode.score.failure) == (0.0, kind)


@pytest.mark.parametrize(
    "step",
    [
        Step(None, 10**400, True),
        Step(None, 1e39, True),
        Step(None, 0.0, True, {"parts": {"size": 10**400}}),
        Step(None, 0.0, True, {"score": Score(1.0, True, {"size": 10**400})}),
        Step(None, 0.0, True, {"score": Score(float("nan"), True)}),
    ],
)
def test_a_number_that_training_cannot_hold_is_a_failure_of_its_step(step: Step) -> None:
    with pytest.raises(CallFailure, match="value: counting: "):
        step_score(step, "counting", 0.0)


@pytest.mark.parametrize(("last", "is_correct"), [(0.1, True), (0.0999, False)])
def test_turns_that_sum_up_to_1_are_correct(last: float, is_correct: bool) -> None:
    assert 0.7 + 0.2 + 0.1 < 1
    _, score = step_score(Step(None, last, True), "counting", 0.7 + 0.2)
    assert score.correct == is_correct


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("no observation", "has no observation"),
        ("role", "the role 'robot'"),
        ("part", "a message's content has "),
        ("surrogate", "surrogates"),
        ("placeholder", "2 <image> for 1 images"),
    ],
)
def test_an_observation_that_cannot_be_shown_costs_its_episode(
    processor: Processor, manager: RewardManager, fault: str, problem: str
) -> None:
    playing = episode_runner(processor, manager, FAULTY, max_turns=2, options={"fault": fault})

    def score() -> Score | None:
        (group,) = groups = RUNNER.run(playing.start([Group(processor.prompt(ROW))], 1))
        RUNNER.run(playing.play(groups, Policy(processor, "3")))
        return group.episodes[0].score

    assert (found := score()) and (found.reward, found.failure) == (0.0, "value")
    playing.reward_manager = fails("stop")
    with pytest.raises(RewardStop, match=rf"environment.name={FAULTY}, rows:5: .*{problem}"):
        score()
    RUNNER.run(playing._environments.close())  # the reward manager is the tests' own


def test_an_image_mark_in_an_observation_without_images_is_text(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "the <image> shows 3", "3")
    play(processor, manager, policy, FAULTY, n=1, max_turns=2, options={"fault": "echo"})
    (start,), (again,) = policy.asked[0][0], policy.asked[1][0]
    assert [image.key for image in again.images] == [start.images[0].key]
    assert processor.decode(again.token_ids.tolist()).count("the <image> shows 3") == 2


def test_an_environment_without_one_start_for_a_group_is_one_sentence(
    processor: Processor, manager: RewardManager
) -> None:
    policy, options = Policy(processor, "3", "3"), {"fault": "other starts"}
    with pytest.raises(ValueError, match="different observations"):
        play(processor, manager, policy, FAULTY, max_turns=2, options=options)


@pytest.mark.parametrize(
    ("fault", "problem"), [("starts as a tool", "no user message"), ("starts as robot", "robot")]
)
def test_a_start_that_cannot_be_shown_leaves_its_prompt_out(
    processor: Processor, fault: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "MAX_REPLACED", 8)
    options: dict[str, Any] = {"options": {"fault": fault}}
    prompt = processor.prompt(ROW)
    playing = episode_runner(processor, fails("zero"), FAULTY, **options)
    assert RUNNER.run(playing.start([Group(prompt)], 2)) == [] and playing.skipped == {"bad": 1}
    with pytest.raises(ValueError, match=f"none of 8 prompts .*rows:5.*{problem}"):
        RUNNER.run(playing.start_or_replace([Group(prompt)], 1, lambda n: [prompt] * 4))
    RUNNER.run(playing.close())


def test_a_user_s_environment_scores_itself_and_starts_as_it_likes(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "3")
    (episode,) = play(processor, manager, policy, FAULTY, n=1, options={"fault": "own start"})
    assert episode.score.parts == {"seen": 1.0} and episode.score.correct
    assert episode.score.reward == 0.7
    (prompt,) = policy.asked[0][0]
    assert prompt.row is ROW and not prompt.images
    assert processor.decode(prompt.token_ids.tolist()).count("How many?") == 1


def test_an_episode_has_no_more_turns_than_are_allowed(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "3", "3", "3", "3")
    (episode,) = play(
        processor, manager, policy, FAULTY, n=1, max_turns=3, options={"fault": "endless"}
    )
    assert len(episode.responses) == 3
    assert episode.score.reward == pytest.approx(0.3 + 1.0), "and the reward of its last words"


def test_two_rewards_asked_for_at_once_are_no_time_of_the_environment_s(
    processor: Processor,
) -> None:
    class Slow(RewardManager):
        async def score(self, response: str, example: Example, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(2.5)
            assert example.images == ROW.images
            return Score(1.0 if response == "3" else 0.25, response == "3")

    manager = Slow([], Reward(on_failure="zero", workers=1, timeout=1, memory_mb=1024))
    policy = Policy(processor, "3")
    options = {"fault": "score twice"}
    (episode,) = play(processor, manager, policy, FAULTY, n=1, timeout=2.25, options=options)
    assert (episode.score.failure, episode.score.reward) == (None, 0.5)
    assert episode.score.correct


@pytest.mark.parametrize("fault", ["reset raises", "reset blocks"])
def test_a_reset_that_fails_is_one_sentence_or_leaves_its_prompt_out(
    processor: Processor, fault: str
) -> None:
    timeout = 1.0 if fault == "reset blocks" else 30.0
    settings: dict[str, Any] = {"options": {"fault": fault}, "timeout": timeout, "workers": 1}
    prompt = processor.prompt(ROW)
    playing = episode_runner(processor, fails("zero"), FAULTY, **settings)
    assert RUNNER.run(playing.start([Group(prompt)], 2)) == [] and playing.skipped == {"bad": 1}
    playing.reward_manager = fails("stop")
    with pytest.raises(RewardStop, match=r"environment.name=.*Faulty, rows:5"):
        RUNNER.run(playing.start([Group(prompt)], 2))
    RUNNER.run(playing.close())


def test_a_start_that_is_too_long_is_left_out_or_one_sentence(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema of the tool alone has more tokens than this recipe's prompts may."""
    monkeypatch.setattr(episodes, "MAX_REPLACED", 8)
    prompt = processor.prompt(ROW)
    playing = episode_runner(processor, graded(), "geo3k_calculator", long_prompts="skip")
    assert RUNNER.run(playing.start([Group(prompt)], 2)) == []
    assert playing.skipped == {"long": 1}
    with pytest.raises(ValueError, match=r"none of 8 prompts in a row can start; .*rows:5"):
        RUNNER.run(playing.start_or_replace([Group(prompt)], 2, lambda n: [prompt] * 4))
    RUNNER.run(playing.close())
    playing = episode_runner(processor, graded(), "geo3k_calculator", long_prompts="refuse")
    with pytest.raises(ValueError, match=r"geo3k_calculator, rows:5 adds to the prompt\. .*tokens"):
        RUNNER.run(playing.start([Group(prompt)], 2))
    RUNNER.run(playing.close())


def test_another_prompt_is_drawn_for_one_that_cannot_start(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (
        processor.prompt(replace(ROW, problem="<image>How many?" + " 5" * more, index=more))
        for more in (0, 15)
    )
    asked: list[int] = []

    def draw(count: int) -> list[Prompt]:
        asked.append(count)
        return [short] * count

    playing = episode_runner(processor, graded(), "geo3k_calculator", "skip")
    monkeypatch.setattr(processor, "_max_prompt_tokens", 10**6)
    (told,) = RUNNER.run(playing.start([Group(short)], 1))
    monkeypatch.setattr(processor, "_max_prompt_tokens", len(told.first_prompt.token_ids))
    groups = [Group(prompt) for prompt in (long, short, long)]
    started = RUNNER.run(playing.start_or_replace(groups, 1, draw))
    assert [group.prompt.row.index for group in started] == [0, 0, 0] and asked == [2]
    assert playing.skipped == {"long": 2}
    RUNNER.run(playing.close())


def test_an_episode_whose_reward_fails_may_be_skipped(processor: Processor) -> None:
    playing = episode_runner(processor, fails("skip"), "vqa")
    group = Group(processor.prompt(ROW))
    RUNNER.run(
        playing.play(
            RUNNER.run(playing.start([group], 3)), Policy(processor, "3", "1", "1 2 3 4 5")
        )
    )
    episodes = group.episodes
    assert [episode.score.skipped for episode in episodes] == [False, False, True]
    assert [episode.score.reward for episode in episodes] == [1.0, 0.5, 0.0]


def test_groups_have_the_responses_that_came_before_an_error(
    processor: Processor, manager: RewardManager
) -> None:
    policy, begun = Policy(processor, *["3"] * 2), list[list[Response]]()
    cut = replace(policy.respond(), finish="abort")

    async def generate(prompts: Any, n: int, groups: Any, on_complete: Any) -> None:
        begun.extend(map(list, groups))
        groups[0][:], groups[2][:] = [cut], [policy.respond()]
        await policy.on_complete([[], [], groups[2], []], on_complete)
        raise RolloutServerError("as told")

    playing = episode_runner(processor, manager, "vqa")
    groups, played = [Group(processor.prompt(ROW)) for _ in range(4)], list[Group]()
    groups[3].responses = (cut,)
    started = RUNNER.run(playing.start(groups, 1))
    with pytest.raises(RolloutServerError, match="as told"):
        RUNNER.run(playing.play(started, generate, played.append))
    assert begun == [[], [], [], [cut]] and played == [groups[2]]
    assert [group.is_played for group in groups] == [False, False, True, False]
    assert [len(group.responses) for group in groups] == [1, 0, 1, 1]
    assert not any(episode.environment for group in groups for episode in group.episodes)


def test_a_failure_may_stop_the_run(processor: Processor) -> None:
    playing = episode_runner(processor, fails("stop"), "vqa")
    with pytest.raises(RewardStop, match=r"reward\.on_failure=stop"):
        groups = RUNNER.run(playing.start([Group(processor.prompt(ROW))], 1))
        RUNNER.run(playing.play(groups, Policy(processor, "1 2 3 4 5")))
    RUNNER.run(playing.close())

"""Episodes of a scripted policy: what is sent, what is trained on, and what happens to faults."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.config.data import Data
from megavlm.config.environment import EnvironmentConfig
from megavlm.config.reward import Reward
from megavlm.data.chat import Message
from megavlm.data.packing import make_pack
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Example, RewardFailure, RewardStop, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.trajectory import Episode, Group, group_tree
from tests.columns import columns
from tests.conftest import png

ROW = Row(5, "<image>How many?", "3", (png(),), "counting", "rows:5")


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["How many? 1 2 3 4 5", "No. Look again."] * 20, seed=0)
    return Processor(folder, Data(max_prompt_tokens=64))


@pytest.fixture(scope="module")
def manager() -> Iterator[RewardManager]:
    manager = RewardManager(
        [Part("r", "vqa")], Reward(on_failure="zero", workers=1, timeout=10, memory_mb=1024)
    )
    yield manager
    asyncio.run(manager.close())


class Policy:
    """Says what its script says next; keeps what it was asked."""

    def __init__(self, processor: Processor, *texts: str, cut: bool = False) -> None:
        self.processor, self.texts, self.cut = processor, list(texts), cut
        self.asked: list[tuple[list[Prompt], int]] = []

    def __call__(
        self, prompts: Sequence[Prompt], n: int, begun: Any = None, enough: int | None = None
    ) -> list[list[Response]]:
        self.asked.append((list(prompts), n))
        return [[self.respond() for _ in range(n)] for _ in prompts]

    def respond(self) -> Response:
        ids = self.processor.encode_answer(self.texts.pop(0))
        ids = ids[:-1] if self.cut else ids
        return Response(tuple(ids), tuple(-0.1 * i for i in range(len(ids))), "stop", "0")


def episode_runner(
    processor: Processor,
    manager: RewardManager,
    name: str,
    long_prompts: str = "refuse",
    **settings: Any,
) -> EpisodeRunner:
    config: Any = SimpleNamespace(
        environment=EnvironmentConfig(name=name, **settings),
        run=SimpleNamespace(seed=1),
        data=SimpleNamespace(system_prompt=processor._system_prompt, long_prompts=long_prompts),
    )
    return EpisodeRunner(config, processor, manager)


def play(
    processor: Processor,
    manager: RewardManager,
    policy: Policy,
    name: str,
    n: int = 2,
    **settings: Any,
) -> list[Episode]:
    playing = episode_runner(processor, manager, name, **settings)
    group = Group(processor.prompt(ROW))
    try:
        playing.play(playing.start([group], n), policy)
    finally:
        playing._environments.close()
        playing._runner.close()  # the reward manager is the tests' own
    return group.episodes


def test_one_turn_is_the_prompt_and_n_responses(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "3", "4")
    episodes = play(processor, manager, policy, "vqa")
    assert [episode.score.correct for episode in episodes] == [True, False]
    assert [episode.text for episode in episodes] == ["3", "4"]
    ((prompts, n),) = policy.asked
    assert n == 2 and len(prompts) == 1 and prompts[0].row is ROW


def test_turns_send_tokens_back_as_they_came_and_show_images(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "5", "3", "3")
    options = {"show": True, "message": "<image>Look again."}
    first, second = play(
        processor,
        manager,
        policy,
        "vqa_retry",
        max_turns=2,
        max_observation_tokens=64,
        options=options,
    )
    assert [first.score.reward, second.score.reward] == [0.5, 1.0]
    assert first.rewards == [0.0, 0.5] and len(second.responses) == 1
    (start,), (again,) = policy.asked[0][0], policy.asked[1][0]
    said = first.responses[0].token_ids
    known = len(start.token_ids) + len(said)
    assert again.token_ids[:known].tolist() == [*start.token_ids.tolist(), *said]
    shown = processor.decode(again.token_ids[known:].tolist())
    assert shown.startswith("user") and "Look again." in shown and shown.endswith("assistant")
    assert [p.key for p in again.images] == [start.images[0].key] * 2
    assert again.short_ids.count(processor.image_token_id) == 2
    assert policy.asked[1][1] == 1 and first.text == "5\n\n3"


def test_the_whole_conversation_is_what_a_template_makes_of_it(
    processor: Processor, manager: RewardManager
) -> None:
    """Token ids and positions of a later turn equal those of the conversation as one prompt."""
    policy = Policy(processor, "5", "3")
    play(processor, manager, policy, "vqa_retry", n=1, max_turns=2)
    chat = [("user", "<image>How many?"), ("assistant", "5"), ("user", "No. Look again.")]
    messages = tuple(Message(role, text) for role, text in chat)
    row = Row(5, "No. Look again.", "3", ROW.images, "", "x", messages=messages)
    whole, (turn,) = processor.prompt(row), policy.asked[1][0]
    assert turn.token_ids.tolist() == whole.token_ids.tolist()
    assert turn.positions.equal(whole.positions) and turn.next_position == whole.next_position
    assert turn.request_ids == whole.request_ids


def test_an_environment_adds_to_the_configured_system_prompt(
    processor: Processor, manager: RewardManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_system_prompt", "Look.")
    policy = Policy(processor, "3", "3")
    play(processor, manager, policy, "vqa", n=1)
    play(processor, manager, policy, "geo3k_calculator", n=1, options={"instruction": "No."})
    plain, told = (processor.decode(prompts[0].token_ids.tolist()) for prompts, _ in policy.asked)
    assert plain.startswith("system\nLook.") and "No." not in plain
    assert told.startswith("system\nLook.\nNo.") and "How many?" in told


def test_a_tree_has_each_turn_below_the_one_before(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "5", "4 4", "3", "2")
    options = {"show": True}
    episodes = play(
        processor,
        manager,
        policy,
        "vqa_retry",
        max_turns=2,
        max_observation_tokens=64,
        options=options,
    )
    lengths = [len(episode.response.token_ids) for episode in episodes]
    places = [columns(length, rewards=torch.arange(float(length))) for length in lengths]
    tree = group_tree(Group(processor.prompt(ROW), episodes=episodes), places)
    assert [segment.parent for segment in tree.segments] == [-1, 0, 1, 2, 0, 4, 5]
    assert [segment.is_target for segment in tree.segments] == [
        False,
        *[True, False, True] * 2,
    ]
    assert len(tree.images) == 3
    pack = make_pack([tree], vision_token_ids=processor.vision_token_ids)
    assert pack.columns is not None
    assert pack.columns.rewards.tolist() == [i for length in lengths for i in range(length)]
    assert len(pack.vision_index) == 3 * 4
    # Each path through the tree is the episode as one sequence.
    for last, episode in ((3, episodes[0]), (6, episodes[1])):
        path, at = [], last
        while at >= 0:
            path.insert(0, tree.segments[at])
            at = tree.segments[at].parent
        prompt, response = episode.prompts[-1], episode.responses[-1]
        ids = [token for segment in path for token in segment.token_ids.tolist()]
        assert ids == [*prompt.token_ids.tolist(), *response.token_ids]
        positions = torch.cat([segment.positions for segment in path], dim=1)
        assert positions[:, : len(prompt.token_ids)].equal(prompt.positions)
        assert positions[0, len(prompt.token_ids)] == prompt.next_position


def test_rewards_come_at_the_ends_of_turns(processor: Processor, manager: RewardManager) -> None:
    settings: Any = SimpleNamespace(
        mask_truncated=False, overlong_buffer=0, loss_aggregation="token_mean"
    )
    policy = Policy(processor, "5", "3", "3")
    episodes = play(processor, manager, policy, "vqa_retry", max_turns=2)
    group = Group(processor.prompt(ROW), episodes=episodes)
    (tree,) = policy_trees([group], settings, max_new_tokens=4)
    first, second, only = [segment.columns for segment in tree.segments if segment.columns]
    # The policy's second word is of the other episode.
    assert [int(first.turn_ids[0]), int(second.turn_ids[0])] == [0, 1]
    assert first.rewards.sum() == 0 and second.rewards[-1] == 0.5
    assert only.rewards.tolist() == [0.0] * (len(only.rewards) - 1) + [1.0]
    assert first.sequence_ids[0] == second.sequence_ids[0] == 0
    assert only.sequence_ids[0] == 1
    metrics = rollout_metrics([group])
    assert metrics["turns"] == 1.5 and metrics["reward"] == 0.75
    assert metrics["accuracy/counting"] == 1.0 and metrics["reward_failures"] == 0


def test_a_response_that_was_cut_short_ends_its_episode(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "5", cut=True)
    (episode,) = play(processor, manager, policy, "vqa_retry", n=1, max_turns=3)
    assert len(episode.responses) == 1 and not episode.score.correct and episode.score.reward == 0


def test_a_response_that_was_cut_short_is_worth_what_its_words_are(processor: Processor) -> None:
    """Less than three honest tries, so that nothing is gained by never ending."""
    manager, tries = graded(wrong=-1.0), {"max_turns": 3, "options": {"discount": 0.5}}
    (cut,) = play(processor, manager, Policy(processor, "5", cut=True), "vqa_retry", n=1, **tries)
    honest = Policy(processor, "5", "4", "2")
    (tried,) = play(processor, manager, honest, "vqa_retry", n=1, **tries)
    assert (cut.score.reward, tried.score.reward) == (-1.0, -0.25)
    assert len(tried.responses) == 3 and cut.rewards[-1] == -1.0


FAULTY = "tests.unit.rollout.user_environments:Faulty"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raise", "exception"),
        ("hang", "timeout"),
        ("block", "timeout"),
        ("allocate", "memory"),
        ("die", "crash"),
        ("nan", "value"),
        ("parts", "exception"),
        ("image", "value"),
        ("unpicklable", "exception"),
    ],
)
def test_a_step_that_fails_is_scored_by_policy(
    processor: Processor, manager: RewardManager, fault: str, kind: str
) -> None:
    settings: dict[str, Any] = {"timeout": 5.0, "max_turns": 2, "workers": 1, "memory_mb": 1024}
    (episode,) = play(
        processor,
        manager,
        Policy(processor, "3"),
        FAULTY,
        n=1,
        options={"fault": fault},
        **settings,
    )
    assert (episode.score.reward, episode.score.failure) == (0.0, kind)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("other starts", "different observations"),
        ("no observation", "has no observation"),
        ("long", "environment.max_observation_tokens=256"),
        ("no user", "no user message"),
        ("placeholder", "1 <image> for 0 images"),
    ],
)
def test_a_broken_interface_is_one_sentence(
    processor: Processor, manager: RewardManager, fault: str, problem: str
) -> None:
    policy = Policy(processor, "3", "3")
    with pytest.raises(ValueError, match=problem):
        play(processor, manager, policy, FAULTY, max_turns=2, options={"fault": fault})


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
        async def score(self, response: str, example: Example, stage: Any = None) -> Any:
            await asyncio.sleep(5.0)
            assert example.images == ROW.images
            return Score(1.0 if response == "3" else 0.25, response == "3")

    manager = Slow([], Reward(on_failure="zero", workers=1, timeout=1, memory_mb=1024))
    policy = Policy(processor, "3")
    options = {"fault": "score twice"}
    (episode,) = play(processor, manager, policy, FAULTY, n=1, timeout=4.5, options=options)
    assert (episode.score.failure, episode.score.reward) == (None, 0.5)
    assert episode.score.correct


@pytest.mark.parametrize("fault", ["reset raises", "reset blocks"])
def test_a_reset_that_fails_is_one_sentence_or_leaves_its_prompt_out(
    processor: Processor, fault: str
) -> None:
    settings: dict[str, Any] = {"options": {"fault": fault}, "timeout": 5.0, "workers": 1}
    prompt = processor.prompt(ROW)
    playing = episode_runner(processor, fails("zero"), FAULTY, **settings)
    assert playing.start([Group(prompt)], 2) == [] and playing.skipped == {"bad": 1}
    playing.reward_manager = fails("stop")
    with pytest.raises(RewardStop, match=r"environment.name=.*Faulty, rows:5"):
        playing.start([Group(prompt)], 2)
    playing.close()


def test_a_start_that_is_too_long_is_left_out_or_one_sentence(processor: Processor) -> None:
    """The instruction alone has more tokens than this recipe's prompts may."""
    chatty: dict[str, Any] = {"options": {"instruction": "many " * 99}}
    prompt = processor.prompt(ROW)
    playing = episode_runner(processor, graded(), "geo3k_calculator", long_prompts="skip", **chatty)
    assert playing.start([Group(prompt)], 2) == []
    assert playing.skipped == {"long": 1}
    with pytest.raises(ValueError, match=r"none of 1000 prompts in a row can start; .*rows:5"):
        playing.start_or_replace([Group(prompt)], 2, lambda n: [prompt] * 250)
    playing.close()
    playing = episode_runner(
        processor, graded(), "geo3k_calculator", long_prompts="refuse", **chatty
    )
    with pytest.raises(ValueError, match=r"geo3k_calculator, rows:5 adds to the prompt\. .*tokens"):
        playing.start([Group(prompt)], 2)
    playing.close()


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

    # A system message of one digit takes at most eleven tokens more.
    monkeypatch.setattr(processor, "_max_prompt_tokens", len(short.token_ids) + 14)
    options = {"instruction": "1"}
    playing = episode_runner(processor, graded(), "geo3k_calculator", "skip", options=options)
    groups = [Group(prompt) for prompt in (long, short, long)]
    started = playing.start_or_replace(groups, 1, draw)
    assert [group.prompt.row.index for group in started] == [0, 0, 0] and asked == [2]
    assert playing.skipped == {"long": 2}
    playing.close()


def test_an_episode_whose_reward_fails_may_be_skipped(processor: Processor) -> None:
    playing = episode_runner(processor, fails("skip"), "vqa")
    group = Group(processor.prompt(ROW))
    playing.play(playing.start([group], 3), Policy(processor, "3", "1", "1 2 3 4 5"))
    episodes = group.episodes
    assert [episode.score.skipped for episode in episodes] == [False, False, True]
    assert [episode.score.reward for episode in episodes] == [1.0, 0.5, 0.0]


def test_with_enough_complete_groups_the_others_wait_with_their_responses(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, *["3"] * 6)
    cut = replace(policy.respond(), finish="abort")
    begun: list[Any] = []

    def generate(prompts: Sequence[Prompt], n: int, **partly: Any) -> list[list[Response]]:
        begun.append(partly)
        return [[cut], [], *([policy.respond()] for _ in prompts[2:])]

    playing = episode_runner(processor, manager, "vqa")
    groups = [Group(processor.prompt(ROW)) for _ in range(5)]
    groups[4].responses = (cut,)
    playing.play(playing.start(groups, 1), generate, enough=2)
    playing._runner.close()
    assert begun == [{"begun": [(), (), (), (), (cut,)], "enough": 2}]
    assert [group.is_played for group in groups] == [False, False, True, True, False]
    assert [len(group.responses) for group in groups] == [1, 0, 1, 1, 1]


def test_a_failure_may_stop_the_run(processor: Processor) -> None:
    playing = episode_runner(processor, fails("stop"), "vqa")
    with pytest.raises(RewardStop, match=r"reward\.on_failure=stop"):
        groups = playing.start([Group(processor.prompt(ROW))], 1)
        playing.play(groups, Policy(processor, "1 2 3 4 5"))
    playing.close()


def graded(wrong: float = 0.0) -> RewardManager:
    class Graded(RewardManager):
        async def score(self, response: str, example: Example, stage: Any = None) -> Any:
            return Score(1.0 if response == "3" else wrong, response == "3")

    return Graded([], Reward(on_failure="zero", workers=1, timeout=1, memory_mb=1024))


def fails(policy: Any) -> RewardManager:
    """A judge whose reward fails for long responses."""

    class Short(RewardManager):
        async def score(self, response: str, example: Example, stage: Any = None) -> Any:
            if len(response) > 5:
                return self.failed(RewardFailure("timeout", "as told"))
            return Score(1.0 if response == "3" else 0.5, response == "3")

    return Short([], Reward(on_failure=policy, workers=1, timeout=1, memory_mb=1024))

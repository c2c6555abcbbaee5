"""Episodes of a scripted policy: what is sent, and what is trained on."""

import json
from typing import Any

import pytest
import torch

from megavlm.config.algorithm import GRPO
from megavlm.data.chat.messages import Message
from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.packing import make_pack
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.environments.base import Observation
from megavlm.environments.wire import pack_observation, unpack_observation
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestRefused
from megavlm.rewards.base import RewardStop
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.scores import example
from megavlm.rollout.trajectory import Group
from tests.support.columns import columns, of_calls
from tests.support.responses import make_response
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, fails, graded, play

TWO_TURNS: dict[str, Any] = {"max_turns": 2, "max_observation_tokens": 64}


def test_one_turn_is_the_prompt_and_n_responses(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "3", "4")
    episodes = play(processor, manager, policy, "vqa")
    assert [episode.score.correct for episode in episodes] == [True, False]
    assert [episode.text for episode in episodes] == ["3", "4"]
    ((prompts, n),) = policy.asked
    assert n == 2 and len(prompts) == 1 and prompts[0].row is ROW


def test_the_images_of_a_step_are_never_formatted(
    processor: Processor, manager: RewardManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    formatted: list[ProcessedImage] = []
    monkeypatch.setattr(ProcessedImage, "__repr__", lambda image: formatted.append(image) or "")
    playing = episode_runner(processor, manager, "vqa")
    group = Group(processor.prompt(ROW))
    assert RUNNER.run(playing.start_or_replace([group], 2, lambda count: [])) == [group]
    RUNNER.run(playing.play([group], Policy(processor, "3", "4")))
    RUNNER.run(playing._environments.close())
    assert not formatted
    assert "image" in repr(processor.prompt(ROW)) and formatted, "what a prompt shows"


def test_episodes_that_are_started_again_start_as_before(
    processor: Processor, manager: RewardManager
) -> None:
    """An environment that makes its prompt from the seed shows the one that was begun."""
    playing, prompt = (
        episode_runner(processor, manager, "user_environments:Seeded"),
        processor.prompt(ROW),
    )
    first, again, other = (Group(prompt, step=step) for step in (None, 0, None))
    RUNNER.run(playing.start([first], 1, step=0))
    RUNNER.run(playing.start([again, other], 1, step=1))
    begun = first.first_prompt.token_ids
    assert again.first_prompt.token_ids.equal(begun)
    assert not other.first_prompt.token_ids.equal(begun)
    RUNNER.run(playing._environments.close())


def test_turns_send_tokens_back_as_they_came_and_show_images(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "5", "3", "3")
    options = {"show": True, "message": "<image>Look again."}
    first, second = play(processor, manager, policy, "vqa_retry", options=options, **TWO_TURNS)
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


def test_an_episode_whose_next_request_is_refused_fails_with_its_rewards(
    processor: Processor,
) -> None:
    """The server may take the policy's own words for an image, or find them too many."""

    class Refused(Policy):
        async def ask(self, prompt: Any, **_: Any) -> Any:
            raise RequestRefused("HTTP 400")

    manager = graded()
    options: dict[str, Any] = {"options": {"fault": "endless"}, "max_turns": 2}
    name = "user_environments:Faulty"
    first, second = play(processor, manager, Refused(processor, "5", "3"), name, **options)
    assert first.has_ended and second.has_ended
    assert (first.score.reward, first.score.failure) == (0.1, "remote")
    assert manager.failures == {"remote": 2}
    with pytest.raises(RewardStop, match=r"rows:5: HTTP 400"):
        play(processor, fails("stop"), Refused(processor, "5", "3"), name, **options)


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


def test_an_environment_keeps_what_messages_hold_besides_text(
    processor: Processor, manager: RewardManager
) -> None:
    calls = [{"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}]
    messages = (
        Message("user", "?"),
        Message("assistant", "", {"tool_calls": calls}),
        Message("tool", "a car", {"tool_call_id": "1"}),
        Message("user", "!"),
    )
    row = Row(5, "!", "3", (), "", "x", messages=messages)
    playing = episode_runner(processor, manager, "vqa")
    sent = json.loads(json.dumps(pack_observation(Observation(example(row).messages))))
    assert playing._renderer.row(row, unpack_observation(sent)) == row
    RUNNER.run(playing._environments.close())


def test_an_environment_adds_to_the_configured_system_prompt(
    processor: Processor, manager: RewardManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.chat_template, "system_prompt", "Look.")
    monkeypatch.setattr(processor, "_max_prompt_tokens", 1024)
    policy = Policy(processor, "3", "3")
    play(processor, manager, policy, "vqa", n=1)
    play(processor, manager, policy, "geo3k_calculator", n=1)
    plain, told = (processor.decode(prompts[0].token_ids.tolist()) for prompts, _ in policy.asked)
    assert plain.startswith("system\nLook.") and "# Tools" not in plain
    assert told.startswith("system\nLook.\n\n# Tools") and "How many?" in told


def test_a_tree_has_each_turn_below_the_one_before(
    processor: Processor, manager: RewardManager
) -> None:
    policy = Policy(processor, "5", "4 4", "3", "2")
    options = {"show": True}
    episodes = play(processor, manager, policy, "vqa_retry", options=options, **TWO_TURNS)
    lengths = [episode.num_tokens for episode in episodes]
    places = [columns(length, rewards=torch.arange(float(length))) for length in lengths]
    group = Group(processor.prompt(ROW), episodes=episodes)
    tree = group_tree(group, of_calls(group, places))
    assert [segment.parent for segment in tree.segments] == [-1, 0, 1, 2, 0, 4, 5]
    assert [x.is_target for x in tree.segments] == [False, *[True, False, True] * 2]
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
    settings = GRPO(mask_truncated=False)
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
    said = [response.logprobs for episode in episodes for response in episode.responses]
    for turn, logprobs in zip((first, second, only), said, strict=True):
        assert turn.rollout_logprobs.equal(torch.tensor(logprobs)), "in float32, in order"
    metrics = rollout_metrics([group])
    assert metrics["turns"] == 1.5 and metrics["reward"] == 0.75
    assert metrics["accuracy/counting"] == 1.0 and metrics["reward_failures"] == 0


def test_a_response_that_was_cut_short_ends_its_episode_and_is_worth_its_words(
    processor: Processor,
) -> None:
    """Less than three honest tries, so that nothing is gained by never ending."""
    manager, tries = graded(wrong=-1.0), {"max_turns": 3, "options": {"discount": 0.5}}
    (cut,) = play(processor, manager, Policy(processor, "5", cut=True), "vqa_retry", n=1, **tries)
    honest = Policy(processor, "5", "4", "2")
    (tried,) = play(processor, manager, honest, "vqa_retry", n=1, **tries)
    assert (cut.score.reward, tried.score.reward) == (-1.0, -0.25)
    assert (len(cut.responses), len(tried.responses)) == (1, 3) and cut.rewards[-1] == -1.0


@pytest.mark.parametrize(("finish", "is_trained"), [("stop", True), ("length", False)])
def test_a_response_ends_its_episode_at_another_stop_token_and_is_not_truncated(
    processor: Processor, finish: str, is_trained: bool
) -> None:
    """As where it is cut short, it is scored; but its tokens are trained on, the last one too."""
    other = processor.suppressed_ids[0]
    settings = GRPO(mask_truncated=True)

    class Ending(Policy):
        def respond(self) -> Response:
            ids = (*self.processor.encode_answer(self.texts.pop(0))[:-1], other)
            return make_response(ids, tuple(-0.1 for _ in ids), finish, "0")

    policy, manager = Ending(processor, "5"), graded(wrong=-1.0)
    (episode,) = play(processor, manager, policy, "vqa_retry", n=1, max_turns=3)
    assert len(episode.responses) == 1 and episode.rewards == [-1.0]
    group = Group(processor.prompt(ROW), episodes=[episode])
    (tree,) = policy_trees([group], settings, max_new_tokens=4)
    _, response = tree.segments
    assert response.token_ids[-1] == other and response.columns is not None
    assert (response.columns.loss_weights > 0).tolist() == [is_trained] * len(response.token_ids)
    assert rollout_metrics([group])["truncated_share"] == float(not is_trained)

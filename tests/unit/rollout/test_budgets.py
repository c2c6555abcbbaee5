"""Budgets of an episode: long observations, many images and all tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megavlm.config.environment import EnvironmentConfig
from megavlm.data.processor import REMOVED_IMAGE, Processor
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Episode, Group
from tests.support.columns import columns, of_calls
from tests.unit.rollout.scripted import ROW, Policy, play

SHOWING = "tool_environments:Showing"


def shown(processor: Processor, episode: Episode, turn: int) -> str:
    """Return the text of a turn's prompt, with one vision token for each image."""
    text: str = processor._tokenizer.decode(episode.prompts[turn].short_ids)
    return text


def played(
    processor: Processor, manager: RewardManager, turns: int, options: Any = None, **settings: Any
) -> Episode:
    policy = Policy(processor, *["3"] * turns)
    settings |= {"n": 1, "max_turns": turns, "options": options or {}}
    (episode,) = play(processor, manager, policy, SHOWING, **settings)
    return episode


def test_a_long_observation_is_refused_and_the_policy_reads_why(
    processor: Processor, manager: RewardManager
) -> None:
    episode = played(processor, manager, 3, {"words": 99}, max_observation_tokens=100)
    assert len(episode.responses) == 3 and episode.score.failure is None
    text = shown(processor, episode, 2)
    assert text.count("error: this was left out: it has ") == 2 and "more more" not in text
    assert "tokens, and 100 are allowed" in text
    assert dict(episode.counts) == {"observations_refused": 2}
    assert len(episode.prompts[2].images) == 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"words": 99}, {"max_observation_tokens": 100, "over_budget": "end"}),
        ({}, {"max_images": 1, "over_budget": "end"}),
        ({"words": 60}, {"max_tokens": 60}),
        ({"words": 99}, {"max_observation_tokens": 10}),  # the note is too long itself
    ],
)
def test_an_episode_over_budget_ends_with_its_last_answer(
    processor: Processor, manager: RewardManager, options: Any, settings: Any
) -> None:
    episode = played(processor, manager, 3, options, **settings)
    assert episode.has_ended and len(episode.responses) == 1
    assert episode.score.reward == pytest.approx(0.25 + 1.0), "its step and its answer"
    assert (episode.score.correct, episode.score.failure) == (True, None)
    assert dict(episode.counts) == {"over_budget": 1}


def test_an_image_too_many_is_refused(processor: Processor, manager: RewardManager) -> None:
    episode = played(processor, manager, 3, max_images=2)
    assert [len(prompt.images) for prompt in episode.prompts] == [1, 2, 2]
    assert "no more than 2 images are allowed" in shown(processor, episode, 2)


def test_the_oldest_image_becomes_a_note_and_the_tree_a_branch(
    processor: Processor, manager: RewardManager
) -> None:
    episode = played(processor, manager, 5, max_images=3, over_budget="replace")
    assert [len(prompt.images) for prompt in episode.prompts] == [1, 2, 3, 3, 3]
    keys = [[image.key for image in prompt.images] for prompt in episode.prompts]
    first, second, third = keys[2]
    assert keys[3][:2] == [first, third] and second not in keys[3] and keys[4][0] == first
    assert len({key for turn in keys for key in turn}) == 5
    texts = [shown(processor, episode, turn) for turn in range(5)]
    assert [text.count(REMOVED_IMAGE) for text in texts] == [0, 0, 0, 1, 2]
    assert [text.count("<|vision_start|>") for text in texts] == [1, 2, 3, 3, 3]
    assert f"turn 0{REMOVED_IMAGE}<|im_end|>" in texts[3], "without the marks of an image"
    assert dict(episode.counts) == {"images_replaced": 2}

    # Each response is trained once, below the prompt that it was sampled for.
    group = Group(processor.prompt(ROW), episodes=[episode])
    tree = group_tree(group, of_calls(group, [columns(episode.num_tokens)]))
    paths = []
    for number, segment in enumerate(tree.segments):
        if segment.is_target:
            path, place = list[torch.Tensor](), number
            while place >= 0:
                path.insert(0, tree.segments[place].token_ids)
                place = tree.segments[place].parent
            paths.append(torch.cat(path).tolist())
    wanted = [
        [*prompt.token_ids.tolist(), *response.token_ids]
        for prompt, response in zip(episode.prompts, episode.responses, strict=True)
    ]
    assert paths == wanted
    assert len(tree.segments) > 2 * len(episode.responses), "there are branches"


def test_a_replaced_image_does_not_hide_a_long_observation(
    processor: Processor, manager: RewardManager
) -> None:
    words = {"words": 12}
    free = played(processor, manager, 3, words)
    lengths = [len(prompt.token_ids) for prompt in free.prompts]
    answers = [len(response.token_ids) for response in free.responses]
    longest = lengths[2] - lengths[1] - answers[1]  # it has more words than the first one
    for most, counts in (
        (longest, {"images_replaced": 1}),
        (longest - 1, {"observations_refused": 1}),
    ):
        settings: Any = {"max_images": 2, "over_budget": "replace", "max_observation_tokens": most}
        assert dict(played(processor, manager, 3, words, **settings).counts) == counts


def test_images_of_the_row_are_never_replaced(processor: Processor, manager: RewardManager) -> None:
    episode = played(processor, manager, 2, {"show": 2}, max_images=2, over_budget="replace")
    assert len(episode.prompts[1].images) == 1
    assert "no more than 2 images are allowed" in shown(processor, episode, 1)


def test_text_after_more_images_than_that_is_shown(
    processor: Processor, manager: RewardManager
) -> None:
    many = replace(ROW, images=ROW.images * 3, problem="How many?")
    episode = played(processor, manager, 2, {"show": 0}, max_images=2, row=many)
    assert len(episode.prompts[1].images) == 3 and not episode.counts


def test_a_tool_that_may_take_longer_than_its_turn_is_refused() -> None:
    settings = EnvironmentConfig(timeout=10.0, tool_timeout=10.0)
    with pytest.raises(
        ValueError,
        match=r"environment.tool_timeout=10 must be below .*=10 \(the end of the episode\)",
    ):
        settings.check()

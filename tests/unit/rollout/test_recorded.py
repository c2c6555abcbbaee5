"""Groups written to a file and read again."""

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from megavlm.config.algorithm import GRPO
from megavlm.config.load import load
from megavlm.data.media.video_sources import Video
from megavlm.data.packs.trees import Tree, trees_to_arrays
from megavlm.data.processor import Processor
from megavlm.environments.base import RecordedAction
from megavlm.inference.protocol import VersionSpan
from megavlm.rewards.base import Score
from megavlm.rollout.groups import policy_trees, rollout_metrics, sample_records
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.trajectory import Episode, Group
from megavlm.run.checks.preflight import check_replay
from tests.conftest import png
from tests.support.calls import branching_group
from tests.support.random_images import image as random_image
from tests.unit.rollout.scripted import ROW, Policy

ROWS: Any = [None] * 5 + [ROW]


def played(processor: Processor, *, own_start: bool = False) -> Group:
    """Two episodes of two turns: one shows the row's image again, the other an image of its own."""
    policy = Policy(processor, "1", "3", "two", "5")
    prompt = start = processor.prompt(ROW)
    if own_start:
        shown = replace(ROW, problem="<image>1 2 3", images=(png(112, 84),))
        start = replace(processor.prompt(shown), row=ROW)
    episodes = []
    for number, image in enumerate((ROW.images[0], png(84, 112))):
        episode, first, last = Episode(start), policy.respond(), policy.respond()
        half = len(first.token_ids) // 2
        spans = VersionSpan("3", 0, half), VersionSpan("4", half, len(first.token_ids))
        first = replace(first, spans=spans, weight_version="4")
        again = replace(ROW, problem="No. <image>Look again.", images=(image,))
        following = processor.next_turn(start, first.token_ids, again)
        score = Score(0.1, False, {"seen": 0.25 * number})
        text = processor.decode(first.token_ids)
        acted = RecordedAction("click", start.images[0].key, (0.5, 0.25))
        episode.add_turn(first, text, 0.1, score, following, [acted])
        last = replace(last, finish="length")
        text = processor.decode(last.token_ids)
        score = Score(1 / 3, True, {"seen": 1.0}, "timeout" if number else None, bool(number))
        episode.add_turn(last, text, 1 / 3, score, None)
        episodes.append(episode)
    return Group(prompt, episodes=episodes)


def arrays(groups: list[Group]) -> Any:
    trees: list[Tree] = policy_trees(groups, GRPO(), max_new_tokens=9, max_turns=2, version=4)
    numbers = {key: int(key[:7], 16) for tree in trees for key in tree.images}
    return trees_to_arrays(trees, numbers)


@pytest.mark.parametrize("own_start", [False, True])
def test_a_step_reads_as_it_was_written(
    tmp_path: Path, processor: Processor, own_start: bool
) -> None:
    groups, recorded = [played(processor, own_start=own_start)] * 2, RecordedRollouts(tmp_path)
    recorded.save(7, groups)
    read = recorded.load(7, ROWS, processor)
    assert recorded.steps() == [7] and len(list(tmp_path.iterdir())) == 1
    before, after = arrays(groups), arrays(read)
    assert before.keys() == after.keys() and len(before) > 5
    assert all(torch.equal(before[name], after[name]) for name in before)
    for group, again in zip(groups, read, strict=True):
        assert again.scores == group.scores and again.is_played
        for mine, theirs in zip(again.prompts, group.prompts, strict=True):
            assert mine.row.problem == theirs.row.problem and mine.short_ids == theirs.short_ids
            for image, other in zip(mine.images, theirs.images, strict=True):
                assert image.key == other.key and all(
                    map(torch.equal, image.contents, other.contents)
                )
    assert rollout_metrics(read, 4) == rollout_metrics(groups, 4)
    records = sample_records(read, processor.pieces)
    texts = [[r["text"] for r in record["responses"]] for record in records]
    assert texts == [["1", "two"]] * 2
    assert records[0]["responses"][1]["parts"] == {"seen": 1.0}
    assert records[0]["responses"][0]["tokens"]()[-1][0] == "<|im_end|>"
    action = {"kind": "click", "image": read[0].start.images[0].key, "at": [0.5, 0.25]}
    assert records[0]["responses"][0]["actions"] == [action]
    (later,) = records[0]["responses"][0]["turns"]
    assert later["actions"] == [] and later["continues"] == 0
    assert records[0]["responses"][0]["rewards"] == [0.1, 1 / 3]


def test_branches_read_as_they_were_written(tmp_path: Path, processor: Processor) -> None:
    images = [png(56, 56), png(84, 112), png(28, 56), random_image(56, 56, 1)]
    row = replace(ROW, problem="<image>One 1<image>two 2", images=tuple(images[:2]))
    group, recorded = branching_group(processor, images, row), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    read = recorded.load(1, [*ROWS[:5], row], processor)
    before, after = arrays([group]), arrays(read)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, theirs in zip(read[0].prompts, group.prompts, strict=True):
        assert mine.short_ids == theirs.short_ids and mine.positions.equal(theirs.positions)
    (record,) = sample_records(read, processor.pieces)
    shown = [len(turn["images"]) for turn in record["responses"][0]["turns"]]
    assert shown == [2, 1, 2, 0, 2], "a turn shows the images that the turn it continues has not"
    assert [turn["continues"] for turn in record["responses"][0]["turns"]] == [0, 0, None, 0, None]


def test_videos_read_as_they_were_written(tmp_path: Path, processor: Processor) -> None:
    """A turn shows the row's video again, and then at another rate, on which positions depend."""
    shown = Video(tuple(random_image(56, 84, seed) for seed in range(4)), 4.0)
    row = replace(ROW, problem="<video>How many?", images=(), videos=(shown,))
    policy, prompt = Policy(processor, "1", "3", "two"), processor.prompt(row)
    episode = Episode(prompt)
    for video in (shown, replace(shown, fps=0.5), None):
        response = policy.respond()
        again = replace(row, problem="No. <video>Look again.", videos=(video,))
        following = video and processor.next_turn(episode.next_prompt, response.token_ids, again)
        episode.add_turn(response, "1", 0.0, Score(0.0, False), following)
    group, recorded = Group(prompt, episodes=[episode]), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    read = recorded.load(1, [*ROWS[:5], row], processor)
    before, after = arrays([group]), arrays(read)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, theirs in zip(read[0].prompts, group.prompts, strict=True):
        assert mine.short_ids == theirs.short_ids and mine.positions.equal(theirs.positions)
        assert mine.request_ids == theirs.request_ids
    assert len(read[0].prompts[-1].images) == 3
    (record,) = sample_records(read, processor.pieces)
    ((_, make_png),) = record["images"]
    first = PIL.Image.open(BytesIO(make_png()))
    assert np.array_equal(np.asarray(first), prompt.images[0].pixels[0])


def test_images_of_rows_are_not_written(tmp_path: Path, processor: Processor) -> None:
    group, recorded = played(processor), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    own = group.episodes[1].prompts[1].images[1].contents[0].nbytes
    assert own < recorded.path(1).stat().st_size < own + 4096


def test_another_step_replaces_it_and_later_ones_go(tmp_path: Path, processor: Processor) -> None:
    recorded, group = RecordedRollouts(tmp_path), played(processor)
    for step in (1, 2, 3):
        recorded.save(step, [group])
    recorded.save(1, [group, group])
    recorded.remove_after(1)
    assert recorded.steps() == [1] and len(recorded.load(1, ROWS, processor)) == 2


def test_other_data_and_no_file_are_refused(tmp_path: Path, processor: Processor) -> None:
    recorded: RecordedRollouts = RecordedRollouts(tmp_path)
    recorded.save(1, [played(processor)])
    others: Any
    for others in (
        ROWS[:5],
        [*ROWS[:5], replace(ROW, problem="<image>How?")],
        [*ROWS[:5], replace(ROW, images=(png(112, 112),))],
    ):
        with pytest.raises(ValueError, match=r"replay: rows:5 has other tokens or images"):
            recorded.load(1, others, processor)
    recorded.path(2).write_bytes(recorded.path(1).read_bytes()[:-5])
    for step in (2, 3):
        with pytest.raises(ValueError, match=f"step_00000{step}.safetensors is not a step"):
            recorded.load(step, ROWS, processor)


def test_the_folder_is_checked_before_a_run(
    tmp_path: Path, processor: Processor, write_recipe: Callable[..., Path]
) -> None:
    def check(steps: int, folder: Path) -> None:
        config = load(
            write_recipe(
                run={"dir": str(tmp_path / "run")},
                algorithm={"name": "grpo", "steps": steps},
                rollout={"replay": str(folder)},
            )
        )
        check_replay(config)

    RecordedRollouts(tmp_path / "other").save(1, [played(processor)])
    check(1, tmp_path / "other")
    with pytest.raises(ValueError, match=r"has steps 1 to 1, but algorithm.steps=2"):
        check(2, tmp_path / "other")
    with pytest.raises(ValueError, match="has no step_"):
        check(2, tmp_path / "none")
    with pytest.raises(ValueError, match=r"is in run\.dir"):
        check(1, tmp_path / "run/rollouts")


def test_a_turn_after_replaced_images_follows_the_turn_before_it(processor: Processor) -> None:
    """Only its own image is new, although the replaced one moves the others. It is no branch."""
    images = [png(56, 56), png(84, 112), png(28, 56), random_image(56, 56, 1)]
    files = [processor.prompt(replace(ROW, images=(one,))).images[0] for one in images]
    policy, first = Policy(processor, "1", "2", "3"), processor.prompt(ROW)
    episode = Episode(first)
    later = [
        processor.with_images(ROW, first.short_ids * len(shown), shown)
        for shown in (files[:3], [files[0], *files[2:]])
    ]
    for following in (*later, None):
        episode.add_turn(policy.respond(), "", 0.0, Score(0.0, False), following)
    episode.count({"images_replaced": 1})
    (record,) = sample_records([Group(first, episodes=[episode])], processor.pieces)
    turns = record["responses"][0]["turns"]
    assert [turn["continues"] for turn in turns] == [0, 1]
    assert [key for key, _ in turns[1]["images"]] == [files[3].key]

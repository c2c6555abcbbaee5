"""The browser's demo: its warm start shows what the environment shows, and solves the tasks except
for second turns that click on the field.
"""

from pathlib import Path

import numpy as np
import pytest

from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.demo.clicks import FIELD, NUM_SHAPES, click
from megavlm.demo.pipeline import RECIPES
from megavlm.demo.shapes import write_dataset
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.rollout.trajectory import Group
from tests.support.browsers import needs_chromium
from tests.unit.rollout.scripted import RUNNER, Policy, episode_runner, graded

NUM_TRAIN = 40


def pixels(prompt: Prompt) -> list[np.ndarray]:
    return [image.pixels.numpy() for image in prompt.images]


@needs_chromium
@pytest.mark.xdist_group("browser")
def test_lessons_are_the_prompts_of_episodes(tmp_path: Path) -> None:
    """Token by token and pixel by pixel, on the first turn and on the second one."""
    data = tmp_path / "browser"
    write_dataset(data, seed=0, num_train=NUM_TRAIN, num_test=2, tasks=["browser"])
    files = [str(data / f"{name}.parquet") for name in ("train", "warm_start")]
    settings = Data(category_key="task", max_pixels=16384, max_prompt_tokens=128)
    lessons, rows = Rows(files[1:], settings), Rows(files[:1], settings)
    texts = [text for row in [*lessons.texts()] for text in (row.answer, *map(str, row.messages))]
    make_tiny_model(tmp_path, texts, seed=0)
    processor = Processor(tmp_path, settings, family_of(tmp_path))
    recipe = load(RECIPES / "browser_shapes.yaml").environment
    playing = episode_runner(
        processor,
        graded(),
        recipe.name,
        max_new_tokens=64,
        **{
            key: getattr(recipe, key)
            for key in ("max_turns", "max_observation_tokens", "workers", "memory_mb", "options")
        },
    )
    seen = set()
    try:
        number = 1  # of the row's second lesson, which acts
        for row in rows:
            turns = [lessons[number]]
            if number + 1 < len(lessons) and len(lessons[number + 1].images) == 2:
                turns.append(lessons[number + 1])
            others = {"click": NUM_SHAPES, "row": NUM_SHAPES - 1, "digit": 0}[row.category]
            number += len(turns) + others + 1
            if (row.category, len(turns)) in seen or len(turns) == 1 != (row.category == "click"):
                continue
            seen.add((row.category, len(turns)))
            said = [turn.answer for turn in turns]
            group = Group(processor.prompt(row))
            playable = RUNNER.run(playing.start([group], 1))
            RUNNER.run(playing.play(playable, Policy(processor, *said)))
            (episode,) = group.episodes
            assert episode.score.correct == (said[-1] != click(FIELD))
            assert episode.counts["tool_errors"] == 0
            for shown, turn in zip(episode.prompts, turns, strict=True):
                lesson = processor.prompt(turn)
                assert shown.token_ids.tolist() == lesson.token_ids.tolist()
                for one, other in zip(pixels(shown), pixels(lesson), strict=True):
                    assert (one == other).all()
    finally:
        RUNNER.run(playing._environments.close())
    assert seen == {("click", 1), ("digit", 2), ("row", 2)}

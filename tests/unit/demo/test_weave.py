"""The zoom demo's pictures hide their colours at the size that the model is shown."""

import asyncio
import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megavlm.config.load import load
from megavlm.data.media.image_decoding import decode
from megavlm.demo.drawing import COLOURS, DrawnExample
from megavlm.demo.pipeline import RECIPES
from megavlm.demo.shapes import write_dataset
from megavlm.demo.weave import PLACES, SHOWN, SIDE, WOVEN, call, draw_weave
from megavlm.environments.base import ChatFormat, Context
from megavlm.environments.base import Image as Shown
from megavlm.rewards.base import Example, Score
from megavlm.tasks.zoom.environment import Zoom
from tests.conftest import read_rows


@pytest.fixture(scope="module")
def drawn() -> list[DrawnExample]:
    rng = np.random.default_rng(0)
    return [draw_weave(rng) for _ in range(200)]


def colour_of(file: bytes) -> str:
    """Return the colour that is near to most pixels of a crop."""
    pixels = np.asarray(decode(file), dtype=int).reshape(-1, 3)
    near = {name: (np.abs(pixels - COLOURS[name]).max(1) < 60).sum() for name in WOVEN}
    return max(near, key=lambda name: near[name])


@pytest.mark.parametrize("side", [SHOWN, 64])
def test_patches_are_grey_where_the_model_sees_the_whole_picture(
    drawn: list[DrawnExample], side: int
) -> None:
    for example in drawn[:20]:
        seen = np.asarray(decode(example.pngs[0]).resize((side, side), Image.Resampling.BICUBIC))
        for box in PLACES.values():
            left, top, right, bottom = (value * side // 1000 for value in box)
            grey = seen[top:bottom, left:right].astype(int)
            assert np.abs(grey - 128).max() <= 8


def test_the_recipe_shows_pictures_at_that_size() -> None:
    data = load(RECIPES / "zoom_shapes.yaml").data
    for side, token in ((SHOWN, 28), (64, 32)):
        assert int(data.max_pixels**0.5) // token * token == side < SIDE / 3


def test_an_answer_is_what_the_crop_shows_and_chance_is_a_quarter(
    drawn: list[DrawnExample],
) -> None:
    for example in drawn:
        turns, (_, crop) = example.lessons[4]["problem"], example.lessons[4]["images"]
        assert turns[1]["content"] in map(call, PLACES)
        assert example.lessons[4]["answer"] == colour_of(crop["bytes"])
        assert example.lessons[0]["answer"] == f"{colour_of(crop['bytes'])} patch"
    answers = Counter(example.answer for example in drawn)
    assert set(answers) == set(WOVEN) and max(answers.values()) < 80


def test_the_warm_start_calls_now_and_then_and_half_at_random(drawn: list[DrawnExample]) -> None:
    asked = [lesson for example in drawn for lesson in example.lessons[1:3]]
    calls = [lesson for lesson in asked if "<tool_call>" in lesson["answer"]]
    assert 0.13 < len(calls) / len(asked) < 0.27
    named = [re.search("(top|bottom) (left|right)", str(lesson["problem"])) for lesson in calls]
    right = [lesson["answer"] == call(place[0]) for lesson, place in zip(calls, named, strict=True)]  # type: ignore[index]
    assert 0.5 < np.mean(right) < 0.75


def test_other_tasks_of_the_same_set_keep_their_captions(tmp_path: Path) -> None:
    write_dataset(tmp_path, seed=0, num_train=4, num_test=2, tasks=["colour", "weave"])
    rows = read_rows([str(tmp_path / "warm_start.parquet")])
    assert Counter(row.category for row in rows) == {"caption": 2, "colour": 2, "lesson": 10}
    assert rows[0].problem == "<image>Describe the image." and not rows[0].messages
    assert [message.role for message in rows[-1].messages] == ["user", "assistant", "tool"]


def test_the_tool_shows_what_the_warm_start_showed(drawn: list[DrawnExample]) -> None:
    options = load(RECIPES / "zoom_shapes.yaml").environment.options

    async def score(text: str, row: Example) -> Score:
        raise AssertionError("it has not ended")

    async def shown(example: DrawnExample) -> bytes:
        context = Context(score, 2, ChatFormat(), max_observation_tokens=48)
        environment = Zoom(context, **options)
        await environment.reset(Example("?", "", images=example.pngs), 0)
        context.shown_sizes[hashlib.sha256(example.pngs[0]).hexdigest()] = (SHOWN, SHOWN)
        step = await environment.step(example.lessons[4]["problem"][1]["content"])
        assert step.observation is not None
        label, image = step.observation.messages[0]["content"]
        assert f"{label}<image>" == example.lessons[4]["problem"][2]["content"]
        assert isinstance(image, Shown)
        return image.data

    for example in drawn[:10]:
        crop = example.lessons[4]["images"][1]["bytes"]
        assert (np.asarray(decode(asyncio.run(shown(example)))) == np.asarray(decode(crop))).all()

"""Episodes that zoom, from the policy's tokens to the crop in its next prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture

from megavlm.config.data import Data
from megavlm.data.media.image_decoding import decode
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.trajectory import Episode, Group
from tests.support.samples import encode
from tests.unit.rollout.scripted import RUNNER, Policy, episode_runner

NOISE = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)
FILE = encode(Picture.fromarray(NOISE).resize((1120, 840), Picture.Resampling.NEAREST))
ROW = Row(0, "<image>What is there?", "3", (FILE,), "", "rows:0")


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'zoom', 'arguments': arguments})}\n</tool_call>"


def processor(folder: Path, family: str) -> Processor:
    texts = ["What is there? 1 2 3 Image 2:", call(image=1, box=[0, 0, 1000, 1000])] * 20
    make_tiny_model(folder, texts, seed=0, family=family)
    data = Data(max_pixels=280 * 224, max_prompt_tokens=128)
    return Processor(folder, data, family_of(folder))


def play(processor: Processor, manager: RewardManager, *texts: str, **settings: Any) -> Episode:
    playing = episode_runner(processor, manager, "zoom", max_turns=len(texts), **settings)
    group = Group(processor.prompt(ROW))
    try:
        RUNNER.run(playing.play(RUNNER.run(playing.start([group], 1)), Policy(processor, *texts)))
    finally:
        RUNNER.run(playing._environments.close())
    return group.episodes[0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_crop_of_the_file_is_in_the_next_prompt(
    tmp_path: Path, manager: RewardManager, family: str
) -> None:
    """The image is shown at a quarter of its size; a family writes boxes in its own form."""
    tiny = processor(tmp_path, family)
    side = tiny.token_side
    width, height = tiny.prompt(ROW).images[0].shown_size
    assert width < 300, "the model does not see the details"
    half = [0, 0, width / 2, height / 2] if family == "qwen2_5_vl" else [0, 0, 500, 500]
    options = {"min_tokens": 80, "show_tools": False}
    text, settings = "It is small. " + call(box=half), {"max_observation_tokens": 112}
    episode = play(tiny, manager, text, "3", options=options, **settings)
    assert episode.score.correct and dict(episode.counts) == {"tool_calls": 1, "tool_errors": 0}
    first, second = (prompt.images for prompt in episode.prompts)
    assert second[0].key == first[0].key
    expected = decode(FILE).crop((0, 0, 560, 420)).resize((10 * side, 8 * side), 1)
    if side == 28:  # data.max_pixels shrinks a token of 32 pixels further
        assert (second[1].pixels[0].numpy() == np.asarray(expected)).all()
    assert 56 <= second[1].num_tokens <= 80


def test_a_result_is_shrunk_until_its_observation_is_within_the_budget(
    tmp_path: Path, manager: RewardManager
) -> None:
    tiny = processor(tmp_path, "qwen2_5_vl")
    whole, rows = call(box=[0, 0, 1000, 1000]), {"coordinates": "relative", "show_tools": False}
    episode = play(tiny, manager, whole, whole * 2, "3", max_observation_tokens=96, options=rows)
    assert dict(episode.counts) == {"tool_calls": 3, "tool_errors": 0}, "nothing was refused"
    sizes = [image.num_tokens for image in episode.prompts[-1].images]
    assert len(sizes) == 4 and 40 < sizes[1] <= 64 and 9 <= sizes[2] == sizes[3] <= 16
    assert episode.score.correct and len(episode.responses) == 3
    assert episode.prompts[2].row.problem == "Image 3:<image>\nImage 4:<image>", "pages show it"

"""Images cut in tiles, and videos of a tile for each frame: prompts against transformers'
processor, what servers are sent, and what other modules keep of such images.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from megavlm.config.data import Data
from megavlm.data.loader import holding
from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.media.video_sources import Video
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.families import family_of
from megavlm.inference.bodies import processed_media
from megavlm.models.folder_files import check_files
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.training.step.rank_images import sources_from_bytes, sources_to_bytes
from tests.conftest import DATA
from tests.parity.models import model_folder
from tests.support.samples import auto_processor, image, our_processor
from tests.unit.data.media.test_videos import video
from tests.unit.rollout.test_recorded import ROWS, arrays, played

SIDE, TOKENS = 56, 4  # of a tile
# (width, height) and tiles, the thumbnail included
SIZES = [((30, 30), 1), ((100, 40), 3), ((64, 64), 1), ((20, 150), 7), ((333, 200), 7)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("internvl")


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return our_processor(folder)


def row(problem: str, *images: bytes, videos: tuple[Video, ...] = ()) -> Row:
    return Row(3, problem, "red", images, "colour", "train.parquet:3", videos)


def pictures() -> list[bytes]:
    return [image(size, seed=seed) for seed, (size, _) in enumerate(SIZES)]


def theirs(folder: Path, prompt: Prompt, images: list[bytes], videos: list[Any]) -> Any:
    """transformers' inputs for the text of our prompt."""
    hf = auto_processor(folder)
    media = {"images": [Image.open(io.BytesIO(x)) for x in images], "videos": videos}
    given = {name: items for name, items in media.items() if items}
    text = hf.tokenizer.decode(prompt.short_ids)
    return hf(text=[text], **given, do_sample_frames=False, return_tensors="pt")


def assert_equal(folder: Path, prompt: Prompt, expected: Any) -> None:
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    inputs = family_of(folder).model_inputs(
        AutoConfig.from_pretrained(folder), prompt.token_ids, prompt.positions, prompt.images
    )
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    assert torch.equal(prompt.positions, torch.arange(len(prompt.token_ids)).expand(3, -1))
    assert prompt.next_position == len(prompt.token_ids)


def test_images_equal_those_of_transformers(folder: Path, processor: Processor) -> None:
    files = pictures()
    prompt = processor.prompt(row("<image>" * len(files) + "What color is it?", *files))
    assert_equal(folder, prompt, theirs(folder, prompt, files, []))
    assert processor.num_tokens(prompt.row) == len(prompt.token_ids)
    tiles = [count for _, count in SIZES]
    assert [item.grid for item in prompt.images] == [(n, SIDE // 14, SIDE // 14) for n in tiles]
    assert [item.num_tokens for item in prompt.images] == [n * TOKENS for n in tiles]


def test_videos_equal_those_of_transformers(folder: Path, processor: Processor) -> None:
    """Together with an image, whose tiles and the frames have the order of the prompt."""
    shown = image((100, 40), seed=3)
    clips = (video(3, fps=1.7, seed=1), video(3, (64, 48), fps=3, seed=2))
    prompt = processor.prompt(row("<video><image><video>What color?", shown, videos=clips))
    frames = [[Image.open(io.BytesIO(x)) for x in clip.frames] for clip in clips]
    assert_equal(folder, prompt, theirs(folder, prompt, [shown], frames))
    assert [item.grid[0] for item in prompt.images] == [3, 3, 3]
    text = auto_processor(folder).tokenizer.decode(prompt.token_ids)
    assert text.count("Frame1: <img>") == text.count("\nFrame3: <img>") == 2
    assert processor.num_tokens(prompt.row) == len(prompt.token_ids)


def test_servers_are_sent_the_tiles(processor: Processor) -> None:
    files = pictures()
    prompt = processor.prompt(row("<image>" * len(files) + "?", *files))
    assert prompt.request_ids == tuple(prompt.token_ids.tolist())
    for held in (prompt, holding(prompt, "requests")):
        length, text, _, *frames = processed_media(held)
        header = json.loads(text)
        assert int.from_bytes(length, "little") == len(text)
        assert header["format"]["sends_frames"]
        for item, medium, content in zip(prompt.images, header["media"], frames, strict=True):
            assert medium["shape"] == [item.grid[0], SIDE, SIDE]
            assert bytes(content) == item.pixels.numpy().tobytes()
    for file, item in zip(files, prompt.images, strict=True):  # records show the whole picture
        assert (
            Image.open(io.BytesIO(item.png())).tobytes() == Image.open(io.BytesIO(file)).tobytes()
        )


def test_tiles_travel_to_the_rank_that_encodes_them(processor: Processor) -> None:
    prompt = processor.prompt(row("<image>" * len(SIZES) + "?", *pictures()))
    images = {item.key: item for item in prompt.images}
    for key, item in sources_from_bytes(sources_to_bytes(images)).items():
        assert isinstance(item, ProcessedImage)
        assert torch.equal(item.patches(), images[key].patches())


def test_groups_of_tiled_images_are_recorded_and_replayed(
    processor: Processor, tmp_path: Path
) -> None:
    group, recorded = played(processor), RecordedRollouts(tmp_path)
    recorded.save(1, [group])
    (again,) = recorded.load(1, ROWS, processor)
    before, after = arrays([group]), arrays([again])
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, others in zip(again.prompts, group.prompts, strict=True):
        for item, other in zip(mine.images, others.images, strict=True):
            assert (
                all(map(torch.equal, item.contents, other.contents)) and item.png() == other.png()
            )


def test_max_pixels_bounds_the_tiles(folder: Path) -> None:
    few = Processor(folder, replace(DATA, max_pixels=3 * SIDE**2 + 5), family_of(folder))
    prompt = few.prompt(row("<image>?", image((333, 200))))
    assert prompt.images[0].grid[0] == 3  # two tiles and a thumbnail
    assert few.num_tokens(prompt.row) == len(prompt.token_ids)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (Data(min_pixels=1000), r"data\.min_pixels=1000: the number of this model's tiles"),
        (Data(max_pixels=1000), r"data\.max_pixels=1000: a tile of this model has 3136 pixels"),
        (Data(video_max_pixels=10**6), r"data\.video_max_pixels=1000000: each frame is one tile"),
    ],
)
def test_bounds_that_tiles_do_not_have_are_refused(folder: Path, data: Data, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Processor(folder, data, family_of(folder))


def test_the_token_of_videos_needs_no_embedding(folder: Path, tmp_path: Path) -> None:
    """InternVL3's vocabulary ends before it. It is neither refused nor suppressed on servers."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((folder / "config.json").read_text())
    token = auto_processor(folder).tokenizer.video_token_id
    values["text_config"]["vocab_size"] = token
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    check_files(tmp_path)
    assert token not in Processor(tmp_path, DATA, family_of(tmp_path)).suppressed_ids

"""Images of an overview and slices, and videos of overviews: prompts against transformers'
processor, what servers are sent, and what is kept of such images.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from megavlm.data.media.image_decoding import decode
from megavlm.data.media.video_sources import Video
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.families import family_of
from megavlm.inference.bodies import processed_media
from megavlm.inference.server_support.megavlm_videos import patch_lines
from megavlm.models.folder_files import check_files
from megavlm.training.step.rank_images import sources_from_bytes, sources_to_bytes
from tests.conftest import DATA
from tests.support.samples import auto_processor, image, our_processor
from tests.unit.data.media.test_videos import video

SIDE = 112  # of a square slice
# (width, height), and rows and columns of slices
SIZES = [
    ((30, 30), (0, 0)),
    ((300, 200), (2, 3)),
    ((112, 112), (0, 0)),
    ((500, 60), (1, 4)),
    ((90, 400), (4, 1)),
]


@pytest.fixture(scope="module")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("minicpmv4_6")


@pytest.fixture(scope="module")
def prompt(folder: Path) -> Prompt:
    return our_processor(folder).prompt(mixed())


def row(problem: str, *images: bytes, videos: tuple[Video, ...] = ()) -> Row:
    return Row(3, problem, "red", images, "colour", "train.parquet:3", videos)


def pictures() -> list[bytes]:
    return [image(size, seed=seed) for seed, (size, _) in enumerate(SIZES)]


def mixed() -> Row:
    # transformers takes no videos of different numbers of frames together.
    videos = (video(3), video(3, (150, 100), seed=1))
    return row("<video>" + "<image>" * len(SIZES) + "<video>What?", *pictures(), videos=videos)


def theirs(folder: Path, row: Row) -> Any:
    """transformers' inputs for the same text."""
    frames = [np.stack([np.asarray(decode(x)) for x in item.frames]) for item in row.videos]
    given = {
        "images": [decode(x) for x in row.images],
        "videos": [torch.from_numpy(x).permute(0, 3, 1, 2) for x in frames],
    }
    return auto_processor(folder)(
        text=[our_processor(folder).chat_template.prompt(row)],
        videos_kwargs={"do_sample_frames": False},
        **{name: items for name, items in given.items() if items},
    )


def test_a_prompt_equals_autoprocessor(folder: Path, prompt: Prompt) -> None:
    expected = theirs(folder, mixed())
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    config = AutoConfig.from_pretrained(folder)
    found = family_of(folder).model_inputs(
        config, prompt.token_ids, prompt.positions, prompt.images
    )
    assert sorted(found) == [
        "pixel_values",
        "pixel_values_videos",
        "target_sizes",
        "target_sizes_videos",
    ]
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_row_knows_its_length_before_its_images_are_decoded(folder: Path) -> None:
    """Also beyond ten images, whose numbers take two tokens."""
    processor = our_processor(folder)
    many = row("<image>" * 12, *[image((20, 20), seed=seed) for seed in range(12)])
    for each in (mixed(), many):
        assert processor.num_tokens(each) == len(processor.prompt(each).token_ids)
    assert torch.equal(processor.prompt(many).token_ids, theirs(folder, many)["input_ids"][0])


def test_parts_of_an_image(prompt: Prompt) -> None:
    shown = [item for item in prompt.images if item.medium == "image"]
    for item, (size, (rows, columns)) in zip(shown, SIZES, strict=True):
        assert item.shown_size == size
        first, *others = item.grids
        assert first[0] == 1 and [grid[0] for grid in others] == [rows * columns] * bool(rows)
        assert item.num_tokens == sum(t * h * w for t, h, w in item.grids) // 16
        assert len(item.patches()) == item.num_patches


def test_a_bound_on_pixels_counts_slices(folder: Path) -> None:
    data = image((300, 200))
    for most, count in ((1, 0), (3, 2), (5, 4), (None, 6)):
        pixels = None if most is None else most * SIDE**2
        bounded = Processor(folder, replace(DATA, max_pixels=pixels), family_of(folder))
        (shown,) = bounded.prompt(row("<image>?", data)).images
        assert (0 if shown.slices is None else len(shown.slices)) == count
    for name, value, message in (
        ("max_pixels", 100, "a slice of this model has about 12544 pixels"),
        ("min_pixels", 100, "its own rule for the size of small images"),
        ("video_max_pixels", 100, "its own rule for the size of frames"),
    ):
        with pytest.raises(ValueError, match=message):
            Processor(folder, replace(DATA, **{name: value}), family_of(folder))


def test_servers_are_sent_each_part(folder: Path, prompt: Prompt) -> None:
    """As frames, whose patches in lines are transformers'."""
    assert prompt.request_ids == tuple(prompt.token_ids.tolist())
    _, header, _, *frames = processed_media(prompt)
    media = json.loads(bytes(header))["media"]
    assert len({medium["hash"] for medium in media}) == len(media) == len(frames)
    lines: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    for medium, frame in zip(media, frames, strict=True):
        pixels = torch.frombuffer(bytearray(frame), dtype=torch.uint8).view(*medium["shape"], 3)
        for each in prompt.images[0].format.normalised(pixels):
            patches, (height, width) = patch_lines(each, 14)
            assert patches.shape == (3, 14, int(height * width) * 14)
            lines[medium["medium"]].append(patches)
    expected = theirs(folder, mixed())
    assert torch.equal(torch.cat(lines["image"], -1)[None], expected["pixel_values"])
    assert torch.equal(torch.cat(lines["video"], -1)[None], expected["pixel_values_videos"])


def test_slices_reach_other_ranks(prompt: Prompt) -> None:
    images = {item.key: item for item in prompt.images if item.medium == "image"}
    read = sources_from_bytes(sources_to_bytes(images))
    for key, item in images.items():
        other = read[key]
        assert torch.equal(other.patches(), item.patches()) and other.grids == item.grids
        assert item.for_plan.grids == item.grids and item.for_plan.pixels.is_meta


def test_files_of_the_folder_agree(folder: Path) -> None:
    check_files(folder)

"""Prompts with videos equal AutoProcessor's, and their positions SGLang's, in every family."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.config.data import Data
from megavlm.data.media.image_decoding import decode
from megavlm.data.media.video_sources import Video
from megavlm.data.media.videos import MAX_VIDEO_PIXELS, ProcessedVideo
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import FAMILIES, family_of
from megavlm.model_config import model_config
from tests.support.samples import auto_processor, chat_text, encode, image, our_processor
from tests.unit.data.media.test_image_decoding import bomb
from tests.unit.data.rope_index import Tokens, sglang_rope_index

Folders = Callable[[str], Path]
# The others are in test_tiles.py and test_slices.py.
PATCHES = [x for x in FAMILIES if x not in ("internvl", "minicpmv4_6")]


def video(number: int, size: tuple[int, int] = (60, 90), fps: float = 2.0, seed: int = 0) -> Video:
    frames = tuple(image(size, seed=100 * seed + index) for index in range(number))
    return Video(frames, fps)


def row(problem: str, *videos: Video, images: tuple[bytes, ...] = ()) -> Row:
    return Row(3, problem, "red", images, "colour", "train.parquet:3", videos)


@pytest.fixture
def processor(folder_of: Folders) -> Processor:
    return our_processor(folder_of("qwen3_vl"))


def theirs(folder: Path, text: str, images: Sequence[bytes], videos: Sequence[Video]) -> Any:
    """AutoProcessor on the chat text, with the frames as arrays and their time as metadata."""
    given: dict[str, Any] = {}
    if images:
        given["images"] = [decode(image) for image in images]
    if videos:
        given |= {
            "videos": [np.stack([decode(frame) for frame in item.frames]) for item in videos],
            "video_metadata": [
                {
                    "fps": item.fps,
                    "total_num_frames": len(item.frames),
                    "frames_indices": list(range(len(item.frames))),
                }
                for item in videos
            ],
            "do_sample_frames": False,
        }
    return auto_processor(folder)(text=[text], return_tensors="pt", **given)


PROMPTS: list[tuple[str, list[tuple[int, int]], list[Video]]] = [
    ("<video>What color is it?", [], [video(4)]),
    ("<video>red", [], [video(2, (30, 20), fps=0.7)]),
    ("<video>", [], [video(5, (101, 57), fps=24.0)]),
    (
        "First <video> and <image>, then<video><image>?",
        [(50, 40), (120, 33)],
        [video(3, fps=1.7, seed=1), video(8, (64, 48), fps=3, seed=2)],
    ),
    ("<image><video>", [(56, 56)], [video(40, (17, 23), fps=1.1)]),
    ("No video at all <image>", [(70, 70)], []),
]


@pytest.mark.parametrize(("problem", "sizes", "videos"), PROMPTS)
@pytest.mark.parametrize("family", PATCHES)
def test_prompt_equals_autoprocessor(
    folder_of: Folders,
    family: str,
    problem: str,
    sizes: list[tuple[int, int]],
    videos: list[Video],
) -> None:
    folder = folder_of(family)
    if is_omni := family == "qwen3_omni_moe":
        # SGLang's positions of other rates lie between two integers; ours are rounded down.
        videos = [replace(item, fps=2.0) for item in videos]
    images = tuple(image(size, seed=7) for size in sizes)
    prompt = our_processor(folder).prompt(row(problem, *videos, images=images))

    text = chat_text(folder, problem)
    expected = theirs(folder, text, images, videos)
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    assert list(prompt.short_ids) == auto_processor(folder).tokenizer(text)["input_ids"]
    assert our_processor(folder).num_tokens(prompt.row) == len(prompt.token_ids)

    marks = problem.replace("<image>", "\0").replace("<video>", "\1")
    order = [mark == "\1" for mark in marks if mark in "\0\1"]
    assert [item.medium == "video" for item in prompt.images] == order
    for is_video, values, grids in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in prompt.images if item.medium == "video" == is_video]
        if items:
            assert torch.equal(torch.cat([item.patches() for item in items]), expected[values])
            assert [list(item.grid) for item in items] == expected[grids].tolist()

    config, seconds = model_config(folder), expected.get("second_per_grid_ts")
    if is_omni:  # its processor takes every video for one of one frame a second
        seconds = torch.tensor(
            [x.seconds_per_grid for x in prompt.images if isinstance(x, ProcessedVideo)]
        )
    per_second = getattr(config, "position_id_per_seconds", 1)
    positions, next_position = sglang_rope_index(
        family,
        config.vision_config.spatial_merge_size,
        getattr(config.vision_config, "tokens_per_second", per_second),
        Tokens.of(config),
        expected["input_ids"][0],
        expected.get("image_grid_thw"),
        expected.get("video_grid_thw"),
        seconds,
    )
    assert torch.equal(prompt.positions, positions)
    assert prompt.next_position == next_position


def test_times_are_the_middle_of_each_pair_of_frames(processor: Processor) -> None:
    (item,) = processor.prompt(row("?", video(5, fps=4.0))).images
    assert isinstance(item, ProcessedVideo)
    assert item.times == (0.125, 0.625, 1.0)
    assert item.seconds_per_grid == 0.5


def test_what_is_not_marked_comes_first(processor: Processor) -> None:
    source = image((40, 40))
    plain = processor.prompt(row("red", video(2), video(3), images=(source,)))
    marked = processor.prompt(row("<image><video><video>red", video(2), video(3), images=(source,)))
    half = processor.prompt(row("red<image>", video(2), video(3), images=(source,)))
    assert torch.equal(plain.token_ids, marked.token_ids)
    assert [item.medium == "video" for item in half.images] == [True, True, False]


def test_a_mark_without_items_is_text(processor: Processor) -> None:
    prompt = processor.prompt(row("what is <video> in HTML?"))
    assert "<video>" in processor.decode(prompt.token_ids.tolist())
    assert prompt.images == ()


def test_same_files_are_processed_once_and_the_key_is_the_content(processor: Processor) -> None:
    first = video(3, seed=5)
    copied = Video(
        tuple(encode(decode(frame), compress_level=0) for frame in first.frames), first.fps
    )
    slower = Video(first.frames, first.fps / 2)
    reverse = Video(first.frames[::-1], first.fps)
    a, b, c, d, e = processor.prompt(row("?", first, first, copied, slower, reverse)).images
    assert a is b and a is not c
    assert a.key == c.key == d.key != e.key
    assert isinstance(a, ProcessedVideo) and isinstance(d, ProcessedVideo)
    assert [2 * time for time in a.times] == list(d.times)


def test_turned_frames_have_the_length_that_their_headers_say(processor: Processor) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    item = row("?", Video(tuple(image((90, 40), seed=i, exif=exif) for i in range(3)), 2.0))
    prompt = processor.prompt(item)
    assert prompt.images[0].grid[1] > prompt.images[0].grid[2]
    assert processor.num_tokens(item) == len(prompt.token_ids)


def turned_differently() -> Video:
    exif = Image.Exif()
    exif[0x0112] = 6
    return Video((image((90, 40)), image((90, 40), exif=exif)), 2.0)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Video((), 2.0), r"a video of 0 frames needs at least 2"),
        (video(1), r"a video of 1 frames needs at least 2; or store it as an image"),
        (Video(video(1).frames * 769, 2.0), r"769 frames has more than 768, the max_frames"),
        (Video((bomb(8000, 8000),) * 3, 2.0), rf"3 frames with 192000000 pixels .* {2**27};"),
        (Video((image((40, 40)), image((40, 41))), 2.0), r"frames have 2 sizes"),
        (Video((image((40, 40)), b"nonsense"), 2.0), r"not an image"),
        (Video((image((40, 40)), bomb(9000, 9000)), 2.0), r"larger than the limit of 67108864"),
    ],
)
def test_bad_videos_are_refused_from_their_headers(
    processor: Processor, item: Video, message: str
) -> None:
    assert MAX_VIDEO_PIXELS == 2**27
    with pytest.raises(ValueError, match=r"train\.parquet:3: .*" + message):
        processor.prompt(row("?", item))
    with pytest.raises(ValueError, match=r"train\.parquet:3: .*" + message):
        processor.num_tokens(row("?", item))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (turned_differently(), r"frames have 2 sizes"),
        (Video((image((40, 40)), image((40, 40), seed=1)[:300]), 2.0), r"image is broken"),
    ],
)
def test_bad_videos_are_refused_when_decoded(
    processor: Processor, item: Video, message: str
) -> None:
    with pytest.raises(ValueError, match=r"train\.parquet:3: .*" + message):
        processor.prompt(row("?", item))


def test_a_prompt_with_videos_is_sent_with_all_its_tokens(processor: Processor) -> None:
    prompt = processor.prompt(row("<image>?", video(4), images=(image((40, 40)),)))
    assert prompt.request_ids == tuple(prompt.token_ids.tolist()) != prompt.short_ids
    text = processor.prompt(row("?", images=(image((40, 40)),)))
    assert text.request_ids == text.short_ids != tuple(text.token_ids.tolist())


def test_a_later_turn_has_the_videos_before_it_and_its_own(processor: Processor) -> None:
    first = processor.prompt(row("<video>What color?", video(4)))
    said = processor.encode_answer("red")
    again = row("And <video><image>?", video(2, seed=4), images=(image((40, 40)),))
    second = processor.next_turn(first, said, again)
    assert [item.medium == "video" for item in second.images] == [True, True, False]
    assert second.images[0] is first.images[0]
    start = len(first.token_ids)
    assert torch.equal(second.token_ids[:start], first.token_ids)
    assert second.token_ids[start : start + len(said)].tolist() == said
    third = processor.next_turn(second, said, row("Bye"))
    assert third.images == second.images


def test_vision_tokens_in_the_text_and_too_long_prompts_are_refused(folder_of: Folders) -> None:
    folder = folder_of("qwen2_vl")
    with pytest.raises(ValueError, match=r"train\.parquet:3: 'problem' holds '<\|video_pad\|>'"):
        our_processor(folder).prompt(row("<video> <|video_pad|>", video(2)))
    short = Processor(folder, Data(max_prompt_tokens=10), family_of(folder))
    with pytest.raises(ValueError, match=r"max_prompt_tokens=10; .* data\.video_max_frames"):
        short.prompt(row("?", video(4)))


def test_vision_token_ids(folder_of: Folders) -> None:
    processor = our_processor(folder_of("qwen2_5_vl"))
    tokenizer = auto_processor(folder_of("qwen2_5_vl")).tokenizer
    names = tokenizer.convert_ids_to_tokens(list(processor.vision_token_ids))
    assert names == ["<|image_pad|>", "<|video_pad|>"]
    assert processor.vision_token_ids == (processor.image_token_id, processor.video_token_id)


def test_an_older_transformers_is_named(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resize(image: Any, size: Any, resample: Any) -> None:
        """As the method of transformers 5.12."""

    monkeypatch.setattr(processor._videos._processor, "resize", resize)
    with pytest.raises(ValueError, match=r"train.parquet:3: videos need .* transformers 5\.19"):
        processor.prompt(row("?", video(4, seed=9)))  # of no other test: it is not in the cache

"""Video files: which frames are sampled, their times and sizes, and files that are refused."""

import io
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.config.data import Data
from megavlm.data.media import video_decoding, videos
from megavlm.data.media.image_sources import DataFolder
from megavlm.data.media.video_decoding import VideoHeader, decode_frames, read_header
from megavlm.data.media.video_sources import Video, VideoFile, read_video
from megavlm.data.media.videos import ProcessedVideo, sample_indices
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, check_media
from megavlm.families import family_of
from tests.conftest import read_rows
from tests.support.samples import auto_processor, chat_text, encode
from tests.support.video_files import encode_video, grey_video
from tests.unit.data.media.test_videos import PATCHES

Folders = Callable[[str], Path]
MANY = Data(max_prompt_tokens=4096)


def row(*shown: VideoFile | Video) -> Row:
    return Row(3, "What color is it?", "red", (), "", "train.parquet:3", shown)


def processed(folder: Path, data: bytes, **keys: Any) -> ProcessedVideo:
    settings = Data(max_prompt_tokens=4096, **keys)
    processor = Processor(folder, settings, family_of(folder))
    shown = row(VideoFile(data))
    (video,) = (prompt := processor.prompt(shown)).images
    assert processor.num_tokens(shown) == len(prompt.token_ids)
    assert isinstance(video, ProcessedVideo)
    return video


def levels(video: ProcessedVideo) -> list[int]:
    """Return the index of each shown frame of `grey_video`."""
    return [round(frame.float().mean().item() / 5) for frame in video.pixels]


@pytest.mark.parametrize(
    ("format_", "codec"),
    [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")],
)
def test_frames_are_sampled_from_a_file(folder_of: Folders, format_: str, codec: str) -> None:
    """3 seconds at 10 frames a second: the processor takes 2 a second."""
    data = grey_video(30, fps=10, format_=format_, codec=codec)
    assert read_header(data) == VideoHeader(30, 64, 48, 10.0)
    video = processed(folder_of("qwen2_5_vl"), data)
    assert levels(video) == pytest.approx([0, 6, 12, 17, 23, 29], abs=1 if codec == "mpeg4" else 0)
    assert video.times == pytest.approx([0.3, 1.45, 2.6])
    assert video.seconds_per_grid == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("number", "fps", "wanted", "most", "expected"),
    [
        (100, 25.0, 2.0, 768, 8),  # 4 seconds
        (100, 25.0, 1.7, 768, 6),  # 6.8 frames become an even number
        (30, 30.0, 2.0, 768, 4),  # at least four, if there are four
        (3, 30.0, 2.0, 768, 2),
        (1000, 10.0, 2.0, 16, 16),
        (1000, 10.0, 2.0, 17, 16),
        (50, 5.0, 60.0, 768, 50),  # no frame twice
    ],
)
def test_number_of_sampled_frames(
    number: int, fps: float, wanted: float, most: int, expected: int
) -> None:
    indices = sample_indices(VideoHeader(number, 1, 1, fps), wanted, most, 2)
    assert len(indices) == expected == len(set(indices))
    assert indices[0] == 0 and indices[-1] == number - 1


@pytest.mark.parametrize("family", PATCHES)
def test_a_prompt_equals_autoprocessor_s_of_the_sampled_frames(
    folder_of: Folders, family: str
) -> None:
    rng = np.random.default_rng(1)
    data = encode_video([rng.integers(0, 255, (70, 90, 3)) for _ in range(17)], 5)
    folder = folder_of(family)
    prompt = Processor(folder, MANY, family_of(folder)).prompt(row(VideoFile(data)))
    indices = sample_indices(read_header(data), 2.0, 768, 2)
    frames = np.stack(list(decode_frames(data, indices)))
    text = chat_text(folder, "<video>What color is it?")
    metadata = {"fps": 5.0, "total_num_frames": 17, "frames_indices": indices}
    expected = auto_processor(folder)(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    assert torch.equal(prompt.images[0].patches(), expected["pixel_values_videos"])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_limits(folder_of: Folders, family: str) -> None:
    """A limit on pixels bounds all frames together, and so the tokens, in every family."""
    folder, data = folder_of(family), grey_video(40, fps=4, size=(640, 480))
    side = 2 * (16 if family == "qwen3_vl" else 14)
    few = processed(folder, data, video_max_frames=6)
    assert len(few.pixels) == 6 and levels(few)[-1] == 39
    rare = processed(folder, data, video_fps=0.5)
    assert len(rare.pixels) == 4
    for most in (100_000, 40_000):
        small = processed(folder, data, video_max_pixels=most)
        assert len(small.pixels) == 20
        assert most / 3 < small.pixels[..., 0].numel() <= most
        assert small.num_tokens == small.pixels[..., 0].numel() // (2 * side**2)
    least = processed(folder, data, video_max_pixels=1)
    assert least.num_tokens == 10, "a frame of the grid has one token at least"


def test_a_limit_on_frames_holds_for_a_list_of_frames(folder_of: Folders) -> None:
    folder = folder_of("qwen2_5_vl")
    processor = Processor(folder, Data(video_max_frames=4), family_of(folder))
    frames = tuple(encode(Image.new("RGB", (30, 30), (i, 0, 0))) for i in range(5))
    with pytest.raises(ValueError, match=r"5 frames has more than 4, data\.video_max_frames; take"):
        processor.prompt(row(Video(frames, 2.0)))


def test_too_many_pixels_are_refused(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MAX_VIDEO_PIXELS", 10_000)
    with pytest.raises(ValueError, match=r"4 frames has 12544 pixels after .* data\.video_fps"):
        processed(folder_of("qwen2_5_vl"), grey_video(8))


def turned(data: bytes) -> bytes:
    """Return an MP4 file that players turn by a quarter, as telephones write them."""
    place = data.index(b"tkhd") + 4 + 40  # version and flags, times, ids, layer and volume
    matrix = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    return data[:place] + struct.pack(">9i", *matrix) + data[place + 36 :]


def test_a_turned_video_is_shown_upright(folder_of: Folders) -> None:
    frame = np.zeros((80, 160, 3), np.uint8)
    frame[:40, :80] = 255  # the top left
    data = turned(encode_video([frame] * 4, 2))
    assert read_header(data) == VideoHeader(4, 80, 160, 2.0)
    (shown,) = decode_frames(data, [3])
    assert shown.shape == (160, 80, 3)
    # Turned clockwise by a quarter: the top left becomes the top right.
    assert shown[:75, 45:].mean() > 250 and shown[85:].mean() < 5 and shown[:, :35].mean() < 5
    video = processed(folder_of("qwen2_5_vl"), data)
    assert video.grid[1] > video.grid[2]


def sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        samples.sample_rate = 8000
        container.mux([*stream.encode(samples), *stream.encode()])
    return file.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://%s\n#EXT-X-ENDLIST\n"
LIST = b"ffconcat version 1.0\nfile %s\n"


BAD = {
    "empty": (b"", "not a video that can be decoded, in one of mov, matroska"),
    "nonsense": (b"nonsense" * 100, "not a video that can be decoded"),
    "without an index": (grey_video(30).split(b"moov")[0], "not a video that can be decoded"),
    "cut off": (
        grey_video(30, movflags="faststart")[:-400],
        r"cut off: it has \d+ of 30 frames",
    ),
    "sound": (sound(), "the file has no video, only sound"),
    "an image": (encode(Image.new("RGB", (40, 40))), "not a video that can be decoded"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_their_row(folder_of: Folders, name: str) -> None:
    folder, (data, message) = folder_of("qwen2_5_vl"), BAD[name]
    processor = Processor(folder, MANY, family_of(folder))
    for use in (processor.prompt, processor.num_tokens):
        with pytest.raises(ValueError, match=r"train\.parquet:3: .*" + message):
            use(row(VideoFile(data)))
    with pytest.raises(ValueError, match=r"train\.parquet:3: video 1: .*" + message):
        check_media(row(VideoFile(data)))


def test_a_file_of_one_frame_is_refused(folder_of: Folders) -> None:
    with pytest.raises(ValueError, match=r"parquet:3: a video of 1 frames needs at least 2"):
        processed(folder_of("qwen2_5_vl"), grey_video(1))


def test_a_file_whose_frames_cannot_be_decoded_is_refused(folder_of: Folders) -> None:
    data = bytearray(grey_video(30))
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    data[start:end] = bytes(end - start)
    with pytest.raises(ValueError, match=r"parquet:3: not a video that can be decoded"):
        processed(folder_of("qwen2_5_vl"), bytes(data))
    with pytest.raises(ValueError, match=r"broken: only 4 of its frames can be decoded"):
        list(decode_frames(grey_video(4), [0, 9]))


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    """Other readers of FFmpeg follow the paths and URLs of a playlist."""
    (tmp_path / "x.ts").write_bytes(grey_video(30, format_="mpegts"))
    for text in (PLAYLIST, LIST):
        data = text % str(tmp_path / "x.ts").encode()
        with pytest.raises(ValueError, match="not a video that can be decoded"):
            read_header(data)


def test_long_and_large_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = grey_video(30)
    monkeypatch.setattr(video_decoding, "MAX_FRAMES", 29)
    with pytest.raises(ValueError, match="a video of 30 frames has more than 29"):
        read_header(data)
    monkeypatch.setattr(video_decoding, "MAX_PIXELS", 1000)
    with pytest.raises(ValueError, match="64 x 48 is larger than the limit of 1000 pixels"):
        read_header(data)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"PyAV, but it is not installed: pip install 'megavlm\["):
        read_header(b"")


def test_forms_of_a_video_file(tmp_path: Path) -> None:
    data = grey_video(4)
    (tmp_path / "a.mp4").write_bytes(data)
    folder = DataFolder(str(tmp_path))
    for value in ("a.mp4", data, {"bytes": data, "path": None}, {"path": "a.mp4"}):
        assert read_video(value, folder) == VideoFile(data)
    assert read_video({"bytes": data, "frames": None, "fps": None}, folder) == VideoFile(data)
    with pytest.raises(ValueError, match=r"video path '\.\./a\.mp4' leaves the data file's folder"):
        read_video("../a.mp4", folder)


def test_files_in_every_column(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"file")
    (tmp_path / "rows.csv").write_text("problem,answer,film\nwhat?,red,1\n")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"problem": "a <video>?", "answer": "red", "film": ["1"]}) + "\n"
    )
    for name in ("rows.csv", "rows.jsonl"):
        rows = read_rows([str(tmp_path / name)], video_key="film", image_keys=(), category_key=None)
        assert rows[0].videos == (VideoFile(b"file"),)
    part = {"type": "video", "video": "1"}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"problem": chat, "answer": "red"}) + "\n")
    (shown,) = read_rows([str(tmp_path / "chat.jsonl")], image_keys=(), category_key=None)
    assert (shown.problem, shown.videos) == ("<video>what?", (VideoFile(b"file"),))

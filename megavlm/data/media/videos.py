"""Videos of prompts: frames are sampled from files, checked, decoded and processed. A family
decides how frames are resized and which tokens stand for them (`Family.videos`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megavlm.config.data import Data
from megavlm.data.media.image_decoding import decode, image_size
from megavlm.data.media.image_processing import (
    Grid,
    ImageCache,
    Medium,
    PatchFormat,
    ProcessedImage,
)
from megavlm.data.media.video_decoding import VideoHeader, decode_frames, read_header
from megavlm.data.media.video_sources import AnyVideo, Video, VideoFile

# Limit for the frames of a video together: 400 MB as RGB, or 768 frames of 448 x 336.
MAX_VIDEO_PIXELS = 2**27
MIN_FRAMES = 4  # of a file that has so many, as in qwen-vl-utils


@dataclass(frozen=True, eq=False)
class ProcessedVideo(ProcessedImage):
    """A resized video. Records show its first frame."""

    medium: ClassVar[Medium] = "video"

    times: tuple[float, ...]  # [t] time in seconds at which each frame of the grid is shown
    seconds_per_grid: float  # seconds from one frame of the grid to the next


@dataclass(frozen=True)
class Clip:
    """The frames that a prompt shows of a video, not yet decoded.

    times: Time of each frame in seconds.
    fps: Frames per second.
    size: Width and height before resizing; EXIF data may swap them.
    frames: Function that decodes the frames and yields each as [H, W, 3].
    """

    times: Sequence[float]
    fps: float
    size: tuple[int, int]
    frames: Callable[[], Iterator[np.ndarray]]


class VideoProcessor:
    """Videos of a family's prompts. A family defines `resized_size`, `resize` and `prompt_ids`.

    token_id: The token that a chat template writes for a video, and that features replace.
    format: Format of the tower's input.
    """

    def __init__(
        self, token_id: int, format_: PatchFormat, max_frames: int, data: Data, cache: ImageCache
    ) -> None:
        """Store the arguments. max_frames: Limit of the model folder's video processor, which
        data.video_max_frames replaces.
        """
        self.token_id, self.format = token_id, format_
        self._step, self._cache, self._fps = format_.temporal, cache, data.video_fps
        self._max_frames, self._max_frames_name = max_frames, "the max_frames of the model folder"
        if data.video_max_frames is not None:
            self._max_frames, self._max_frames_name = data.video_max_frames, "data.video_max_frames"

    def resized_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a resized frame."""
        raise AssertionError("a family defines the size of its resized videos")

    def resize(self, frame: Tensor, size: tuple[int, int]) -> Tensor:
        """Resize a frame [3, H, W] to a height and width."""
        raise AssertionError("a family defines how its videos are resized")

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        """Return the tokens of a prompt for a video. number: Its place among the prompt's videos,
        from 0.
        """
        raise AssertionError("a family defines the tokens of its videos")

    def video(self, video: AnyVideo) -> ProcessedVideo:
        """Decode and process a video, or return it from the cache.

        Raises ValueError for frames that are not images or differ in size, for a single frame, for
        more frames or pixels than the limits, and as `read_header` does.
        """
        stored = [video.data] if isinstance(video, VideoFile) else video.frames
        digest = _digest([repr(getattr(video, "fps", None)).encode(), *stored])
        processed = self._cache.get(digest)
        if processed is None:
            processed = self._process(self._clip(video), digest)
            self._cache.put(digest, processed)
        assert isinstance(processed, ProcessedVideo)
        return processed

    def prompt_length(self, video: AnyVideo, number: int) -> int:
        """Return the number of tokens of a prompt for a video, from the headers of its frames, or
        the first frame of a file. `prompt_ids` describes `number`. Raises ValueError for the same
        videos as `video` does.
        """
        clip = self._clip(video)
        width, height = clip.size
        # EXIF data may swap height and width, with the same number of tokens.
        size = self._resized_size(clip, height, width)
        grid = self.format.grid(len(clip.times), *size)
        return len(self.prompt_ids(grid, self._grid_times(clip), number))

    def _clip(self, video: AnyVideo) -> Clip:
        """Return the frames to show, after checks of their number and pixels."""
        if isinstance(video, VideoFile):
            return self._sampled(video)
        number = len(video.frames)
        if number > self._max_frames:
            raise ValueError(
                f"a video of {number} frames has more than {self._max_frames}, "
                f"{self._max_frames_name}; take fewer, or raise data.video_max_frames"
            )
        _check_several(number)
        sizes = [image_size(frame) for frame in video.frames]
        pixels = sum(width * height for width, height in sizes)
        if pixels > MAX_VIDEO_PIXELS:
            raise ValueError(
                f"a video of {number} frames with {pixels} pixels is larger than the limit of "
                f"{MAX_VIDEO_PIXELS}; take fewer or smaller frames"
            )
        _check_one_size(sizes)
        times = [index / video.fps for index in range(number)]
        return Clip(times, video.fps, sizes[0], lambda: _decoded(video))

    def _sampled(self, video: VideoFile) -> Clip:
        header = read_header(video.data)
        _check_several(header.num_frames)
        indices = sample_indices(header, self._fps, self._max_frames, self._step)
        return Clip(
            [index / header.fps for index in indices],
            len(indices) / header.num_frames * header.fps,
            (header.width, header.height),
            lambda: decode_frames(video.data, indices),
        )

    def grid_time(self, first: float, last: float) -> float:
        """Return the time in seconds of a frame of the grid, given the times of the first and the
        last video frame in it.
        """
        return (first + last) / 2

    def _grid_times(self, clip: Clip) -> tuple[float, ...]:
        """Return the time of each frame of the grid in seconds. The last video frame is repeated to
        fill the grid.
        """
        last = len(clip.times) - 1
        return tuple(
            self.grid_time(clip.times[first], clip.times[min(first + self._step - 1, last)])
            for first in range(0, last + 1, self._step)
        )

    def _resized_size(self, clip: Clip, height: int, width: int) -> tuple[int, int]:
        number = len(clip.times)
        size = self.resized_size(number, height, width)
        if number * size[0] * size[1] > MAX_VIDEO_PIXELS:
            raise ValueError(
                f"a video of {number} frames has {number * size[0] * size[1]} pixels after "
                f"resizing, more than the limit of {MAX_VIDEO_PIXELS}; lower data.video_fps, "
                "data.video_max_frames or data.video_max_pixels"
            )
        return size

    def _process(self, clip: Clip, digest: bytes) -> ProcessedVideo:
        """Decode and resize frame by frame, so that only resized frames are in memory."""
        number, content, size = len(clip.times), hashlib.sha256(), (0, 0)
        resized: list[Tensor] = []
        for index, frame in enumerate(clip.frames()):
            height, width, _ = frame.shape
            if index == 0:
                first, size = frame.shape, self._resized_size(clip, height, width)
                content.update(f"video {number}x{width}x{height}:".encode())
            _check_one_size({first, frame.shape})
            pixels = np.array(frame, order="C")  # a copy, as torch warns of pixels that are fixed
            content.update(pixels.data)
            small = self.resize(torch.from_numpy(pixels).permute(2, 0, 1), size)
            resized.append(small.permute(1, 2, 0))
        return ProcessedVideo(
            key=content.hexdigest(),
            pixels=torch.stack(resized).contiguous(),
            format=self.format,
            digest=digest,
            times=self._grid_times(clip),
            seconds_per_grid=self._step / clip.fps,
        )


def sample_indices(header: VideoHeader, fps: float, max_frames: int, step: int) -> list[int]:
    """Return the indices of the frames that are sampled from a file: `fps` a second, evenly spread
    from the first frame to the last, as qwen-vl-utils does.

    Their number is a multiple of `step` and at most max_frames; at least MIN_FRAMES if the file has
    them.
    """
    wanted = max(header.num_frames / header.fps * fps, MIN_FRAMES)
    number = int(min(wanted, max_frames, header.num_frames)) // step * step
    spread = np.linspace(0, header.num_frames - 1, number).round()
    return [int(index) for index in spread]


def _check_several(number: int) -> None:
    if number < 2:
        raise ValueError(f"a video of {number} frames needs at least 2; or store it as an image")


def _check_one_size(sizes: Iterable[tuple[int, ...]]) -> None:
    if (count := len(set(sizes))) > 1:
        raise ValueError(f"a video's frames have {count} sizes; make them all the same")


def _decoded(video: Video) -> Iterator[np.ndarray]:
    return (np.asarray(decode(frame)) for frame in video.frames)


def _digest(parts: Sequence[bytes]) -> bytes:
    # The lengths are hashed first, so that ("ab", "c") and ("a", "bc") differ.
    digest = hashlib.sha256(repr([len(part) for part in parts]).encode())
    for part in parts:
        digest.update(part)
    return digest.digest()

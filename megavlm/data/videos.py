"""Videos whose frames are already sampled: checked, decoded and processed. A family decides how
frames are resized and which tokens stand for them (`Family.videos`).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megavlm.data.image_decoding import decode, image_size
from megavlm.data.image_processing import ImageCache, PatchFormat, ProcessedImage
from megavlm.data.rows import Video

# Limit for all frames of a video together: 400 MB as RGB, or 768 frames of 448 x 336.
MAX_VIDEO_PIXELS = 2**27

Grid = tuple[int, int, int]  # (t, h, w) in patches


@dataclass(frozen=True, eq=False)
class ProcessedVideo(ProcessedImage):
    """A resized video for the tower. Rollout servers do not get videos."""

    is_video: ClassVar[bool] = True

    times: tuple[float, ...]  # [t] time in seconds at which each frame of the grid is shown
    seconds_per_grid: float  # seconds from one frame of the grid to the next


class VideoProcessor:
    """Videos of a family's prompts. A family defines `resize` and `prompt_ids`.

    token_id: The token that a chat template writes for a video, and that features replace.
    format: Format of the tower's input.
    """

    def __init__(
        self, token_id: int, format_: PatchFormat, max_frames: int, cache: ImageCache
    ) -> None:
        """Store the arguments. max_frames: Limit of the model folder's video processor."""
        self.token_id, self.format = token_id, format_
        self._step, self._max_frames, self._cache = format_.temporal, max_frames, cache

    def resize(self, frames: Tensor) -> Tensor:
        """Resize frames [F, 3, H, W]."""
        raise AssertionError("a family defines how its videos are resized")

    def prompt_ids(self, grid: Grid, times: Sequence[float]) -> list[int]:
        """Return the tokens of a prompt for a video."""
        raise AssertionError("a family defines the tokens of its videos")

    def video(self, video: Video) -> ProcessedVideo:
        """Decode and process a video, or return it from the cache.

        Raises ValueError for frames that are not images or differ in size, for a single frame, and
        for more frames or pixels than the limits.
        """
        digest = _digest([repr(video.fps).encode(), *video.frames])
        processed = self._cache.get(digest)
        if processed is None:
            self._check_limits(video)
            processed = self._process(video, digest)
            self._cache.put(digest, processed)
        assert isinstance(processed, ProcessedVideo)
        return processed

    def prompt_length(self, video: Video) -> int:
        """Return the number of tokens of a prompt for a video, from the headers of its frames only.
        Raises ValueError as `video` does.
        """
        self._check_limits(video)
        width, height = _one_size(image_size(frame) for frame in video.frames)
        frames = torch.empty(len(video.frames), 3, height, width, device="meta")
        # EXIF data may swap height and width, with the same number of tokens.
        grid = self.format.grid(len(frames), *self.resize(frames).shape[-2:])
        return len(self.prompt_ids(grid, self.times(video)))

    def times(self, video: Video) -> tuple[float, ...]:
        """Return the time of each frame of the grid in seconds. It is the mean time of the first
        and the last video frame in it. The last video frame is repeated to fill the grid.
        """
        last = len(video.frames) - 1
        return tuple(
            (first / video.fps + min(first + self._step - 1, last) / video.fps) / 2
            for first in range(0, last + 1, self._step)
        )

    def _check_limits(self, video: Video) -> None:
        """Check the number of frames and pixels before any pixel is decoded."""
        number, most = len(video.frames), self._max_frames
        if number < 2:
            raise ValueError(
                f"a video of {number} frames needs at least 2; or store it as an image"
            )
        if number > most:
            raise ValueError(
                f"a video of {number} frames has more than {most}, the max_frames of the model "
                "folder's video processor; take fewer"
            )
        pixels = sum(width * height for width, height in map(image_size, video.frames))
        if pixels > MAX_VIDEO_PIXELS:
            raise ValueError(
                f"a video of {number} frames with {pixels} pixels is larger than the limit of "
                f"{MAX_VIDEO_PIXELS}; take fewer or smaller frames"
            )

    def _process(self, video: Video, digest: bytes) -> ProcessedVideo:
        frames = [decode(frame) for frame in video.frames]
        width, height = _one_size(frame.size for frame in frames)
        pixels = np.stack([np.asarray(frame) for frame in frames])
        resized = self.resize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        size = f"video {len(frames)}x{width}x{height}:".encode()
        return ProcessedVideo(
            key=hashlib.sha256(size + pixels.tobytes()).hexdigest(),
            pixels=resized.permute(0, 2, 3, 1).contiguous(),
            format=self.format,
            digest=digest,
            times=self.times(video),
            seconds_per_grid=self._step / video.fps,
        )


def _one_size(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    distinct = set(sizes)
    if len(distinct) > 1:
        raise ValueError(f"a video's frames have {len(distinct)} sizes; make them all the same")
    return distinct.pop()


def _digest(parts: Sequence[bytes]) -> bytes:
    # The lengths are hashed first, so that ("ab", "c") and ("a", "bc") differ.
    digest = hashlib.sha256(repr([len(part) for part in parts]).encode())
    for part in parts:
        digest.update(part)
    return digest.digest()

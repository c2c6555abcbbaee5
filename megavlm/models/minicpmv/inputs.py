"""Inputs of MiniCPM-V 4.6: an image becomes an overview and, if it is large, a grid of slices of
another size; a frame of a video is an overview only. Positions are plain.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megavlm.config.data import Data
from megavlm.data.media.image_processing import (
    ImageCache,
    ImageProcessor,
    PatchFormat,
    ProcessedImage,
)
from megavlm.data.media.videos import Grid, VideoProcessor
from megavlm.models.common.inputs import resize, text_positions
from megavlm.models.minicpmv.config import SIDE

__all__ = ["images", "model_inputs", "positions", "videos"]


@dataclass(frozen=True)
class Cut:
    """Sizes of an image's overview and slices, each a height and a width in pixels. rows, columns:
    Number of slices; both are 0 for an image without slices.
    """

    overview: tuple[int, int]
    rows: int
    columns: int
    slices: tuple[int, int]


class Marks:
    """The tokens around those that features replace."""

    def __init__(self, processor: Any) -> None:
        """Read the tokens of transformers' MiniCPMV4_6Processor."""
        self._tokenizer = tokenizer = processor.tokenizer
        self._numbers = processor.image_processor.use_image_id
        self._number_marks = processor.image_id_start_token, processor.image_id_end_token
        self._image, self._slice = (
            tuple(tokenizer.convert_tokens_to_ids([start, end]))
            for start, end in (
                (processor.image_start_token, processor.image_end_token),
                (processor.slice_start_token, processor.slice_end_token),
            )
        )
        self.new_line = self._ids("\n")
        self.number = functools.lru_cache(self._number)

    def overview(self, token: int, num_tokens: int) -> list[int]:
        """Return the tokens of an overview."""
        return [self._image[0], *[token] * num_tokens, self._image[1]]

    def slice(self, token: int, num_tokens: int) -> list[int]:
        """Return the tokens of a slice."""
        return [self._slice[0], *[token] * num_tokens, self._slice[1]]

    def _number(self, number: int) -> list[int]:
        """Return the tokens for the place of an image among the images of a prompt, or of a video
        among its videos.
        """
        start, end = self._number_marks
        return self._ids(f"{start}{number}{end}") if self._numbers else []

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class SlicedImages(ImageProcessor):
    """Images with an overview, and slices if they are large."""

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Read the format of transformers' MiniCPMV4_6Processor. data.max_pixels bounds the pixels
        of the slices together, without the overview.

        Raises ValueError for data.min_pixels, and for a bound that is smaller than a slice.
        """
        tool = processor.image_processor
        pixels = tool.scale_resolution**2
        if data.min_pixels is not None:
            raise ValueError(
                f"data.min_pixels={data.min_pixels}: this model has its own rule for the size of "
                "small images; leave it out"
            )
        if data.max_pixels is not None and data.max_pixels < pixels:
            raise ValueError(
                f"data.max_pixels={data.max_pixels}: a slice of this model has about {pixels} "
                "pixels; raise it to these or a multiple"
            )
        super().__init__(hf_config.image_token_id, _format_of(hf_config, tool), cache)
        most = tool.max_slice_nums if tool.slice_mode else 1
        self._most = most if data.max_pixels is None else min(most, data.max_pixels // pixels)
        self._tool, self._marks = tool, Marks(processor)

    def num_patches(self, width: int, height: int) -> int:
        cut, patch = self._cut(width, height), self.format.patch
        areas = (h * w // patch**2 for h, w in (cut.overview, cut.slices))
        return sum(n * area for n, area in zip((1, cut.rows * cut.columns), areas, strict=True))

    def prompt_ids(self, num_tokens: int, size: tuple[int, int], number: int) -> list[int]:
        cut, marks, token = self._cut(*size), self._marks, self.token_id
        area = (self.format.patch * self.format.merge) ** 2
        whole, each = (h * w // area for h, w in (cut.overview, cut.slices))
        ids = [*marks.number(number), *marks.overview(token, whole)]
        for row in range(cut.rows):
            ids += [*(marks.new_line if row else ()), *marks.slice(token, each) * cut.columns]
        return ids

    def process(self, picture: Image.Image) -> ProcessedImage:
        tool, pixels = self._tool, self._tool.process_image(picture)
        _, height, width = pixels.shape
        cut = self._cut(width, height)
        rows, columns, (h, w) = cut.rows, cut.columns, cut.slices
        overview, slices = resize(tool, pixels, *cut.overview).permute(1, 2, 0), None
        if rows:
            refined = resize(tool, pixels, rows * h, columns * w)
            split = refined.view(3, rows, h, columns, w).permute(1, 3, 2, 4, 0)
            slices = split.reshape(rows * columns, h, w, 3).contiguous()
        whole = torch.from_numpy(np.array(picture))
        return self.processed(overview[None].contiguous(), whole, slices)

    def _cut(self, width: int, height: int) -> Cut:
        tool = self._tool
        side, patch, size = tool.scale_resolution, tool.patch_size, (height, width)
        grid = tool.get_sliced_grid(size, self._most, side)
        overview = tool.find_best_resize(size, side, patch, allow_upscale=grid is None)
        if grid is None:
            return Cut(overview, 0, 0, (0, 0))
        rows, columns = grid
        h, w = tool.get_refine_size(size, grid, side, patch, allow_upscale=True)
        return Cut(overview, rows, columns, (h // rows, w // columns))


class OverviewVideos(VideoProcessor):
    """Videos whose frames are shown one after another, each as an overview without slices."""

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Wrap the video processor of transformers' MiniCPMV4_6Processor. Raises ValueError for
        data.video_max_pixels.
        """
        if data.video_max_pixels is not None:
            raise ValueError(
                f"data.video_max_pixels={data.video_max_pixels}: this model has its own rule for "
                "the size of frames; lower data.video_max_frames instead"
            )
        tool = processor.video_processor
        token, format_ = hf_config.video_token_id, _format_of(hf_config, tool)
        super().__init__(token, format_, tool.max_num_frames, data, cache)
        self._tool, self._marks = tool, Marks(processor)

    def resized_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        tool = self._tool
        side, patch, size = tool.scale_resolution, tool.patch_size, (height, width)
        resized: tuple[int, int] = tool.find_best_resize(size, side, patch, allow_upscale=True)
        return resized

    def resize(self, frame: Tensor, size: tuple[int, int]) -> Tensor:
        return resize(self._tool, frame, *size)

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        frames, h, w = grid
        shown = self._marks.overview(self.token_id, h * w // self.format.merge**2)
        return [*self._marks.number(number), *shown * frames]


images, videos, positions = SlicedImages, OverviewVideos, text_positions


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return the patches [1, 3, P, patches * P] of images and of videos, line by line, and the
    height and width in patches of each overview, slice and frame.
    """
    inputs = {}
    for medium, ending in (("image", ""), ("video", "_videos")):
        shown = [image for image in images if image.medium == medium]
        if not shown:
            continue
        patch = shown[0].format.patch
        frames = [frame for image in shown for part in image.frames() for frame in part]
        patches = [
            F.unfold(frame[None], patch, stride=patch)
            .view(3, patch, patch, -1)
            .transpose(2, 3)
            .flatten(2)
            for frame in frames
        ]
        inputs[f"pixel_values{ending}"] = torch.cat(patches, -1)[None]
        sizes = [[x // patch for x in frame.shape[1:]] for frame in frames]
        inputs[f"target_sizes{ending}"] = torch.tensor(sizes, dtype=torch.int32)
    return inputs


def _format_of(hf_config: Any, tool: Any) -> PatchFormat:
    patch = hf_config.vision_config.patch_size
    return PatchFormat.of(tool, patch=patch, temporal=1, merge=SIDE, sends_frames=True)

"""Inputs of GLM-4.1V and GLM-4.6V. A video is shown frame by frame: each frame stands between the
tokens of an image, with image tokens in between, and its time follows as text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megavlm.config.data import Data
from megavlm.data.media.image_processing import ImageCache, ProcessedImage
from megavlm.data.media.videos import Grid, ProcessedVideo
from megavlm.data.packs.positions import Span
from megavlm.models.common.inputs import MultimodalPositions, ResizedImages, ResizedVideos

__all__ = ["images", "model_inputs", "positions", "videos"]


class GlmImages(ResizedImages):
    """Images of any size, resized to a multiple of a token's side. In the model folder, the bounds
    on their pixels count every frame of a patch.
    """

    def folder_bounds(self, image_processor: Any) -> tuple[int, int]:
        smallest, largest = super().folder_bounds(image_processor)
        frames = self.format.temporal
        return -(-smallest // frames), largest // frames

    def resized_size(self, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        from transformers.models.glm4v.image_processing_glm4v import smart_resize

        frames = self.format.temporal
        side = self.format.patch * self.format.merge
        return smart_resize(frames, height, width, frames, side, low * frames, high * frames)


class GlmVideos(ResizedVideos):
    """Videos: for each frame of the grid its image tokens, then its time as text."""

    bounds_all_frames = True

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Wrap the video processor of transformers' Glm4vProcessor or Glm46VProcessor."""
        super().__init__(hf_config, processor, data, cache)
        self._whole, self._shown = processor, hf_config.image_token_id

    def max_frames(self, processor: Any) -> int:
        return int(processor.max_duration * processor.fps)

    def grid_time(self, first: float, last: float) -> float:
        return first

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        _, h, w = grid
        num_tokens = h * w // self.format.merge**2
        # The two releases write times in different forms; their processors know it.
        texts = [self._whole.replace_frame_token_id(time, num_image_tokens=1) for time in times]
        frames = self._whole.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            shown
            for frame in frames
            for token in frame
            for shown in [token] * (num_tokens if token == self._shown else 1)
        ]


images, videos = GlmImages, GlmVideos


def positions(hf_config: Any) -> MultimodalPositions:
    """Return the positions of prompts."""
    return MultimodalPositions(hf_config, _frames)


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return patches, grids and positions. Images and videos share a token, so transformers does
    not take both in one sequence. Each frame of a video is therefore given as an image, which the
    tower encodes in the same way.
    """
    if not images:
        return {}
    grids = [grid for image in images for grid in _frame_grids(image)]
    return {
        "pixel_values": torch.cat([image.patches() for image in images]),
        "image_grid_thw": torch.tensor(grids),
        "position_ids": positions[:, None],
    }


def _frame_grids(image: ProcessedImage) -> list[Grid]:
    t, h, w = image.grid
    return [(1, h, w)] * t


def _frames(video: ProcessedVideo) -> list[Span]:
    return [Span(grid) for grid in _frame_grids(video)]

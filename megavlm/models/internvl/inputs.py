"""Inputs of InternVL3 and InternVL3.5: an image becomes tiles of one size and a thumbnail, and each
frame of a video one tile. Positions are plain.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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
from megavlm.models.common.inputs import text_positions
from megavlm.models.internvl.config import merge_size, square_side

__all__ = ["images", "model_inputs", "positions", "videos"]

MAX_FRAMES = 32  # of a video, as in SGLang, if the model folder's processor has no number


class TiledImages(ImageProcessor):
    """Images cut in tiles, as many as their aspect ratio asks for, with a thumbnail of the whole if
    they are several.
    """

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Read the format of transformers' InternVLProcessor. data.max_pixels bounds the pixels of
        the tiles together, without the thumbnail.

        Raises ValueError for data.min_pixels, and for a bound that is smaller than a tile.
        """
        tiles = processor.image_processor
        pixels = tiles.size.height * tiles.size.width
        if data.min_pixels is not None:
            raise ValueError(
                f"data.min_pixels={data.min_pixels}: the number of this model's tiles follows from "
                "the aspect ratio of an image; leave it out"
            )
        if data.max_pixels is not None and data.max_pixels < pixels:
            raise ValueError(
                f"data.max_pixels={data.max_pixels}: a tile of this model has {pixels} pixels; "
                "raise it to these or a multiple"
            )
        super().__init__(hf_config.image_token_id, _format_of(hf_config, tiles), cache)
        # As transformers' InternVLProcessor does, whatever crop_to_patches is in the folder.
        self._max_tiles = tiles.max_patches
        if data.max_pixels is not None:
            self._max_tiles = min(self._max_tiles, data.max_pixels // pixels)
        self._tiles = tiles
        self._start, self._end = processor.start_image_token_id, processor.end_image_token_id

    def num_patches(self, width: int, height: int) -> int:
        bounds = {"max_patches": self._max_tiles, "crop_to_patches": True}
        number: int = self._tiles.get_number_of_image_patches(height, width, bounds)
        _, rows, columns = self.format.grid(1, self._tiles.size.height, self._tiles.size.width)
        return number * rows * columns

    def prompt_ids(self, num_tokens: int, size: tuple[int, int], number: int) -> list[int]:
        return [self._start, *[self.token_id] * num_tokens, self._end]

    def process(self, picture: Image.Image) -> ProcessedImage:
        tiles = self._tiles
        cut = tiles.crop_image_to_patches(
            tiles.process_image(picture)[None],
            min(tiles.min_patches, self._max_tiles),
            self._max_tiles,
            patch_size=tiles.size,
            resample=tiles.resample,
        )[0]
        whole = torch.from_numpy(np.array(picture))
        return self.processed(cut.permute(0, 2, 3, 1).contiguous(), whole)


class FrameVideos(VideoProcessor):
    """Videos: the number of each frame as text, and the tokens of an image of one tile."""

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Wrap the video processor of transformers' InternVLProcessor. Raises ValueError for
        data.video_max_pixels.
        """
        if data.video_max_pixels is not None:
            raise ValueError(
                f"data.video_max_pixels={data.video_max_pixels}: each frame is one tile in this "
                "model; lower data.video_max_frames instead"
            )
        frames = processor.video_processor
        token, format_ = processor.tokenizer.video_token_id, _format_of(hf_config, frames)
        super().__init__(token, format_, frames.num_frames or MAX_FRAMES, data, cache)
        self._frames, self._whole = frames, processor

    def resized_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        return self._frames.size.height, self._frames.size.width

    def resize(self, frame: Tensor, size: tuple[int, int]) -> Tensor:
        frames = self._frames
        resized: Tensor = frames.resize(frame[None], size=frames.size, resample=frames.resample)[0]
        return resized

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        frames, h, w = grid
        num_tokens, whole = h * w // self.format.merge**2, self._whole
        shown = f"{whole.start_image_token}{whole.image_token}{whole.end_image_token}"
        text = "\n".join(f"Frame{number + 1}: {shown}" for number in range(frames))
        return [
            token
            for written in whole.tokenizer(text, add_special_tokens=False)["input_ids"]
            for token in [written] * (num_tokens if written == whole.image_token_id else 1)
        ]


images, videos, positions = TiledImages, FrameVideos, text_positions


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return normalised tiles [tiles, 3, H, W], of images and videos."""
    if not images:
        return {}
    return {"pixel_values": torch.cat([frames for image in images for frames in image.frames()])}


def _format_of(hf_config: Any, processor: Any) -> PatchFormat:
    """Return the format of tiles. Raises ValueError for tiles that the tower has no positions
    for.
    """
    vision = hf_config.vision_config
    side, size = square_side(vision.image_size), processor.size
    if (size.height, size.width) != (side, side):
        raise ValueError(
            f"its processors resize to {size.height} x {size.width} pixels, but config.json has "
            f"vision_config.image_size={side}: copy the files from where the model came from"
        )
    patch = square_side(vision.patch_size)
    return PatchFormat.of(
        processor, patch=patch, temporal=1, merge=merge_size(hf_config), sends_frames=True
    )

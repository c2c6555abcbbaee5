"""Inputs of InternVL: an image becomes tiles of one size and a thumbnail; positions are plain."""

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
from megavlm.data.packs.positions import plain_positions

__all__ = ["images", "model_inputs", "positions"]


class TiledImages(ImageProcessor):
    """Images cut in tiles. A server gets the whole picture and cuts it by itself."""

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Read the format of transformers' InternVLProcessor. Raises ValueError for bounds on
        pixels, because the tiles of the model folder are cut from an image of any size.
        """
        if not data.min_pixels is data.max_pixels is None:
            raise ValueError(
                f"data.min_pixels={data.min_pixels}, data.max_pixels={data.max_pixels}: this model "
                "cuts images of any size in tiles; leave them out"
            )
        merge = round(1 / hf_config.downsample_ratio)
        patch = hf_config.vision_config.patch_size[0]
        tiles = processor.image_processor
        format_ = PatchFormat.of(tiles, patch=patch, temporal=1, merge=merge)
        super().__init__(hf_config.image_token_id, format_, cache)
        self._tiles = tiles
        self._start, self._end = processor.start_image_token_id, processor.end_image_token_id

    def num_patches(self, width: int, height: int) -> int:
        tiles: int = self._tiles.get_number_of_image_patches(height, width, {})
        size = self._tiles.size
        return tiles * (size.height // self.format.patch) * (size.width // self.format.patch)

    def prompt_ids(self, num_tokens: int) -> list[int]:
        return [self._start, *[self.token_id] * num_tokens, self._end]

    def process(self, picture: Image.Image) -> ProcessedImage:
        tiles = self._tiles
        cut = tiles.crop_image_to_patches(
            tiles.process_image(picture)[None],
            tiles.min_patches,
            tiles.max_patches,
            patch_size=tiles.size,
            resample=tiles.resample,
        )[0]
        whole = torch.from_numpy(np.array(picture))
        return self.processed(cut.permute(0, 2, 3, 1).contiguous(), whole)


def images(hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> TiledImages:
    """Return the images of prompts."""
    return TiledImages(hf_config, processor, data, cache)


def positions(hf_config: Any) -> Any:
    """Return the positions of prompts."""
    return plain_positions


def model_inputs(
    hf_config: Any, token_ids: Tensor, positions: Tensor, images: Sequence[ProcessedImage]
) -> dict[str, Tensor]:
    """Return normalised tiles [tiles, 3, H, W], as transformers' processor does."""
    if not images:
        return {}
    tiles = []
    for image in images:
        mean, std = (torch.tensor(x)[:, None, None] for x in (image.format.mean, image.format.std))
        tiles.append((image.content.permute(0, 3, 1, 2).float() - mean) / std)
    return {"pixel_values": torch.cat(tiles)}

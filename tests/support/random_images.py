"""Images of random pixels, without a processor."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from megavlm.data.media.image_processing import PatchFormat, ProcessedImage


def random_image(
    key: str, vision: Any, grid: tuple[int, int, int], generator: torch.Generator
) -> ProcessedImage:
    """Return an image of a grid of patches. vision: transformers' configuration of the tower."""
    patch, temporal = vision.patch_size, vision.temporal_patch_size
    size = (grid[0] * temporal, grid[1] * patch, grid[2] * patch, 3)
    pixels = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    cut = PatchFormat((128.0,) * 3, (64.0,) * 3, patch, temporal, vision.spatial_merge_size)
    return ProcessedImage(key, pixels, cut)


def image(width: int, height: int, seed: int) -> bytes:
    """A PNG of random squares."""
    pixels = np.random.default_rng(seed).integers(
        0, 255, (-(-height // 7), -(-width // 7), 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()

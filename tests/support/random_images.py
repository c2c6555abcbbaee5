"""Images of random pixels, without a processor."""

import io

import numpy as np
import torch
from PIL import Image

from megavlm.data.media.image_processing import PatchFormat, ProcessedImage
from megavlm.models.common.architecture import PatchSizes


def random_image(
    key: str, sizes: PatchSizes, grid: tuple[int, int, int], generator: torch.Generator
) -> ProcessedImage:
    """Return an image of a grid of patches."""
    size = (grid[0] * sizes.frames, grid[1] * sizes.side, grid[2] * sizes.side, 3)
    pixels = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    cut = PatchFormat((128.0,) * 3, (64.0,) * 3, sizes.side, sizes.frames, sizes.merge)
    return ProcessedImage(key, pixels, cut)


def image(width: int, height: int, seed: int) -> bytes:
    """A PNG of random squares."""
    pixels = np.random.default_rng(seed).integers(
        0, 255, (-(-height // 7), -(-width // 7), 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()

"""Prompts by hand, without a processor."""

import torch

from megavlm.data.media.image_processing import PatchFormat, ProcessedImage
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row


def make_prompt(first_id: int = 7, num_tokens: int = 3, images: int = 0) -> Prompt:
    return Prompt(
        row=Row(first_id, "?", "!", (b"",) * images, "", f"rows.parquet:{first_id}"),
        token_ids=torch.arange(num_tokens),
        short_ids=(first_id, 1, 2),
        positions=torch.zeros(3, num_tokens, dtype=torch.int64),
        next_position=num_tokens,
        images=tuple(make_image(f"key{i}", 2, 2) for i in range(images)),
    )


def make_image(key: str, height: int, width: int) -> ProcessedImage:
    """Return a black image of so many patches, of one pixel each."""
    pixels = torch.zeros(1, height, width, 3, dtype=torch.uint8)
    one_pixel = PatchFormat((0.0,) * 3, (1.0,) * 3, patch=1, temporal=2, merge=2)
    return ProcessedImage(key, pixels, one_pixel)

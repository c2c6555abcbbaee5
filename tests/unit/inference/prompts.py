"""Prompts by hand, without a processor."""

import torch

from megavlm.data.image_processing import ProcessedImage
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row


def make_prompt(first_id: int = 7, num_tokens: int = 3, pngs: tuple[bytes, ...] = ()) -> Prompt:
    return Prompt(
        row=Row(first_id, "?", "!", pngs, "", f"rows.parquet:{first_id}"),
        token_ids=torch.arange(num_tokens),
        short_ids=(first_id, 1, 2),
        positions=torch.zeros(3, num_tokens, dtype=torch.int64),
        next_position=num_tokens,
        images=tuple(
            ProcessedImage(f"key{i}", png, torch.zeros(4, 8), (1, 2, 2))
            for i, png in enumerate(pngs)
        ),
    )

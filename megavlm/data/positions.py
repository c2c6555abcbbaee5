"""M-RoPE positions of text and images, as integers computed once when a prompt is built."""

from collections.abc import Sequence

import torch
from torch import Tensor


def mrope_positions(
    token_ids: Tensor,
    grids: Sequence[tuple[int, int, int]],
    *,
    image_token_id: int,
    merge_size: int,
) -> tuple[Tensor, int]:
    """Positions [3, T] (time, height, width) of token_ids [T], and the position that follows them.

    grids: (t, h, w) of each image in patches, in the order of their tokens; an image has
        t * h * w / merge_size**2 consecutive tokens.

    Text advances the three rows together. An image starts where the text before it ends: its rows
    are the start plus the frame, the line and the column of each merged patch. What follows
    starts max(h, w) / merge_size later, which may be less than the image's number of tokens.
    Source: transformers, Qwen2_5_VLModel.get_rope_index (images and text; no video).
    """
    index = (token_ids == image_token_id).nonzero().flatten()
    pieces: list[Tensor] = []
    cursor = position = seen = 0  # the next token, its position, and the image tokens before it
    for t, h, w in grids:
        h, w = h // merge_size, w // merge_size
        count = t * h * w
        assert seen + count <= len(index), "fewer image tokens than the grids need"
        first, last = int(index[seen]), int(index[seen + count - 1])
        assert last - first == count - 1, "an image's tokens must be consecutive"
        pieces.append(text_positions(first - cursor, position))
        position += first - cursor
        pieces.append(position + _image(t, h, w))
        position += max(h, w)
        cursor, seen = last + 1, seen + count
    assert seen == len(index), "more image tokens than the grids need"
    pieces.append(text_positions(len(token_ids) - cursor, position))
    return torch.cat(pieces, dim=1), position + len(token_ids) - cursor


def text_positions(length: int, start: int) -> Tensor:
    """Positions [3, length] of plain text that starts at position `start`."""
    return torch.arange(start, start + length).expand(3, -1)


def _image(t: int, h: int, w: int) -> Tensor:
    ranges = torch.arange(t), torch.arange(h), torch.arange(w)
    return torch.stack(torch.meshgrid(*ranges, indexing="ij")).reshape(3, -1)

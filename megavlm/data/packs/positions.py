"""Positions of text, images and videos: integers, computed once when a prompt is built. A token has
three: time, height and width. They are equal for text, and for a family without M-RoPE.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive vision tokens: an image, a video, or one timestamped frame of a video."""

    grid: tuple[int, int, int]  # (t, h, w) in patches; t * h * w / merge_size**2 tokens
    time_step: float = 1.0  # frame i of the grid is at floor(i * time_step)


def mrope_positions(
    token_ids: Tensor,
    spans: Sequence[Span],
    *,
    vision_token_ids: Iterable[int],
    merge_size: int,
) -> tuple[Tensor, int]:
    """Return the positions [3, T] (time, height, width) of token_ids [T], and the next position.

    spans: Vision spans in the order of their tokens. They cover all tokens in vision_token_ids.

    Text advances the three rows together. A span starts where the text before it ends: its rows
    are this start plus the time, the line and the column of each merged patch. Text after a span,
    or a response, starts after the largest of the span's positions; in a long video that is a time.

    Source: get_rope_index in the authors' fine-tuning code (qwen-vl-finetune/qwenvl/data/rope2d.py
    of QwenLM/Qwen2.5-VL), in transformers 4 and in SGLang. transformers 5.3 and later starts the
    text max(h, w) / merge_size after the start of the span. This is less for a long video of
    Qwen2-VL and Qwen2.5-VL, and the same for everything else.
    """
    vision = torch.isin(token_ids, torch.tensor(list(vision_token_ids)))
    index = vision.nonzero().flatten()
    grids = torch.tensor([span.grid for span in spans], dtype=torch.long).reshape(-1, 3)
    t, h, w = (grids // torch.tensor([1, merge_size, merge_size])).unbind(1)
    counts = t * h * w
    ends = counts.cumsum(0)
    assert int(counts.sum()) == len(index), "vision tokens are not as many as the spans need"
    first, last = index[ends - counts], index[ends - 1]
    assert torch.equal(last - first, counts - 1), "a span's tokens must be consecutive"

    # In float32, as in transformers: float64 could round to other integers.
    steps = torch.tensor([item.time_step for item in spans], dtype=torch.float32)
    duration = ((t - 1) * steps).long() + 1

    # A text token advances the position by one, a span by its size at its last token. The sum over
    # all earlier tokens is the position of a text token, and the start of the span for a token in
    # a span.
    advance = (~vision).long()
    advance[last] = torch.maximum(torch.maximum(h, w), duration)
    positions = (advance.cumsum(0) - advance).repeat(3, 1)

    span = torch.arange(len(spans)).repeat_interleave(counts)
    patch = torch.arange(len(index)) - (ends - counts)[span]
    frame, line, column = patch // (h * w)[span], patch // w[span] % h[span], patch % w[span]
    positions[:, index] += torch.stack([(frame * steps[span]).long(), line, column])
    return positions, int(positions.max()) + 1


def plain_positions(token_ids: Tensor, images: Sequence[object]) -> tuple[Tensor, int]:
    """Return the positions [3, T] of token_ids [T] without M-RoPE, and the next position: vision
    tokens count as text does.
    """
    return text_positions(len(token_ids), 0), len(token_ids)


def text_positions(length: int, start: int) -> Tensor:
    """Return the positions [3, length] of text that starts at position `start`."""
    return torch.arange(start, start + length).expand(3, -1)

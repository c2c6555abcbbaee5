"""Videos in prompts of Qwen3-VL: frame by frame, each frame after its time as text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megavlm.data.positions import Span
from megavlm.data.videos import Grid, ProcessedVideo


class TimestampedFrames:
    """Format of Qwen3-VL: for each frame of the grid, its time as text, then its video tokens
    between the tokens for vision start and vision end.
    """

    def __init__(self, video_id: int, merge_size: int, processor: Any) -> None:
        """Set the format. `processor` is transformers' Qwen3VLProcessor."""
        self._video_id = video_id
        self._merged = merge_size**2
        self._tokenizer = processor.tokenizer
        self._start: int = processor.vision_start_token_id
        self._end: int = processor.vision_end_token_id

    def ids(self, grid: Grid, times: Sequence[float]) -> list[int]:
        _, h, w = grid
        frame = [self._start, *[self._video_id] * (h * w // self._merged), self._end]
        texts = [f"<{time:.1f} seconds>" for time in times]
        stamps = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [token for stamp in stamps for token in (*stamp, *frame)]

    def spans(self, video: ProcessedVideo) -> list[Span]:
        t, h, w = video.grid
        return [Span((1, h, w))] * t


def video_tokens(hf_config: Any, processor: Any, merge_size: int) -> TimestampedFrames:
    """Return the format of videos in prompts."""
    return TimestampedFrames(hf_config.video_token_id, merge_size, processor)


def extra_inputs(videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """Return no tensors: transformers' model takes only patches and grids."""
    return {}

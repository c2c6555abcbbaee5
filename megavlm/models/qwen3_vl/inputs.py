"""Inputs of Qwen3-VL: a video is shown frame by frame, each frame after its time as text."""

from collections.abc import Sequence
from typing import Any

from megavlm.config.data import Data
from megavlm.data.media.image_processing import Grid, ImageCache
from megavlm.data.media.videos import ProcessedVideo
from megavlm.data.packs.positions import Span
from megavlm.models.common.inputs import (
    MultimodalPositions,
    ResizedVideos,
    images,
    model_inputs,
)

__all__ = ["images", "model_inputs", "positions", "videos"]


class TimestampedFrames(ResizedVideos):
    """Videos of Qwen3-VL: for each frame of the grid, its time as text, then its video tokens
    between the tokens for vision start and vision end.
    """

    bounds_all_frames = True

    def __init__(self, hf_config: Any, processor: Any, data: Data, cache: ImageCache) -> None:
        """Wrap the video processor of transformers' Qwen3VLProcessor."""
        super().__init__(hf_config, processor, data, cache)
        self._tokenizer = processor.tokenizer
        self._start: int = processor.vision_start_token_id
        self._end: int = processor.vision_end_token_id

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        _, h, w = grid
        num_tokens = h * w // self.format.merge**2
        frame = [self._start, *[self.token_id] * num_tokens, self._end]
        texts = [f"<{time:.1f} seconds>" for time in times]
        stamps = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [token for stamp in stamps for token in (*stamp, *frame)]


videos = TimestampedFrames


def positions(hf_config: Any) -> MultimodalPositions:
    """Return the positions of prompts."""
    return MultimodalPositions(hf_config, _frame_spans)


def _frame_spans(video: ProcessedVideo) -> list[Span]:
    t, h, w = video.grid
    return [Span((1, h, w))] * t

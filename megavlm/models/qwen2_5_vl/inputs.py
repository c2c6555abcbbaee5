"""Inputs of Qwen2.5-VL: a video is one run of tokens, with M-RoPE positions that follow time."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megavlm.data.media.image_processing import Grid
from megavlm.data.media.videos import ProcessedVideo
from megavlm.data.packs.positions import Span
from megavlm.models.common.inputs import (
    MultimodalPositions,
    ResizedVideos,
    images,
    model_inputs,
)

__all__ = ["images", "model_inputs", "positions", "videos"]


class TokensOnly(ResizedVideos):
    """Videos of Qwen2.5-VL and Qwen2-VL: one run of video tokens. Only positions encode time."""

    bounds_all_frames = False

    def prompt_ids(self, grid: Grid, times: Sequence[float], number: int) -> list[int]:
        t, h, w = grid
        return [self.token_id] * (t * h * w // self.format.merge**2)


videos = TokensOnly


def positions(hf_config: Any) -> MultimodalPositions:
    """Return the positions of prompts."""
    per_second = hf_config.vision_config.tokens_per_second
    return MultimodalPositions(hf_config, partial(timed_span, per_second))


def timed_span(tokens_per_second: float, video: ProcessedVideo) -> list[Span]:
    """Return the one run of a video's tokens. tokens_per_second: Steps of its times a second."""
    # transformers multiplies in float32; double precision would round down elsewhere.
    return [Span(video.grid, float(tokens_per_second * torch.tensor(video.seconds_per_grid)))]

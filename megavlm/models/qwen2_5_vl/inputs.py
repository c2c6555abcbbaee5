"""Videos in prompts of Qwen2.5-VL: one run of tokens, with M-RoPE positions that follow time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megavlm.data.positions import Span
from megavlm.data.videos import Grid, ProcessedVideo


class TokensOnly:
    """Format of Qwen2.5-VL and Qwen2-VL: one run of video tokens. Only positions encode time."""

    def __init__(self, video_id: int, merge_size: int, tokens_per_second: float | None) -> None:
        """Set the format.

        tokens_per_second: M-RoPE positions per second, None for one position per grid frame.
        """
        self._video_id = video_id
        self._merged = merge_size**2
        self._tokens_per_second = tokens_per_second

    def ids(self, grid: Grid, times: Sequence[float]) -> list[int]:
        t, h, w = grid
        return [self._video_id] * (t * h * w // self._merged)

    def spans(self, video: ProcessedVideo) -> list[Span]:
        if self._tokens_per_second is None:
            return [Span(video.grid)]
        # transformers multiplies in float32; double precision would round down elsewhere.
        time_step = self._tokens_per_second * torch.tensor(video.seconds_per_grid)
        return [Span(video.grid, float(time_step))]


def video_tokens(hf_config: Any, processor: Any, merge_size: int) -> TokensOnly:
    """Return the format of videos in prompts."""
    per_second = hf_config.vision_config.tokens_per_second
    return TokensOnly(hf_config.video_token_id, merge_size, per_second)


def extra_inputs(videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """Return the seconds per grid frame of each video [videos]. transformers computes positions
    from them.
    """
    if not videos:
        return {}
    return {"second_per_grid_ts": torch.tensor([video.seconds_per_grid for video in videos])}

"""Qwen2-VL's videos in prompts: one run of tokens, with one M-RoPE time for each grid frame."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megavlm.data.videos import ProcessedVideo
from megavlm.models.qwen2_5_vl.inputs import TokensOnly


def video_tokens(hf_config: Any, processor: Any, merge_size: int) -> TokensOnly:
    """Return how prompts write a video."""
    return TokensOnly(hf_config.video_token_id, merge_size, tokens_per_second=None)


def extra_inputs(videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """Return no tensors: patches and grids are all that transformers' model takes."""
    return {}

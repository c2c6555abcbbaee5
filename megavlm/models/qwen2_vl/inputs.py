"""Videos in prompts of Qwen2-VL: one run of tokens, with one M-RoPE time per grid frame."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megavlm.data.videos import ProcessedVideo
from megavlm.models.qwen2_5_vl.inputs import TokensOnly


def video_tokens(hf_config: Any, processor: Any, merge_size: int) -> TokensOnly:
    """Return the format of videos in prompts."""
    return TokensOnly(hf_config.video_token_id, merge_size, tokens_per_second=None)


def extra_inputs(videos: Sequence[ProcessedVideo]) -> dict[str, Tensor]:
    """Return no tensors: transformers' model takes only patches and grids."""
    return {}

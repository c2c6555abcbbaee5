"""Inputs of Qwen2-VL: a video is one run of tokens, with one M-RoPE time per grid frame."""

from typing import Any

from megavlm.data.packs.positions import Span
from megavlm.models.common.inputs import MultimodalPositions, images, model_inputs
from megavlm.models.qwen2_5_vl.inputs import videos

__all__ = ["images", "model_inputs", "positions", "videos"]


def positions(hf_config: Any) -> MultimodalPositions:
    """Return the positions of prompts."""
    return MultimodalPositions(hf_config, lambda video: [Span(video.grid)])

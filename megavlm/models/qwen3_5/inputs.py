"""Qwen3.5's videos in prompts, which are Qwen3-VL's."""

from megavlm.models.qwen3_vl.inputs import extra_inputs, video_tokens

__all__ = ["extra_inputs", "video_tokens"]

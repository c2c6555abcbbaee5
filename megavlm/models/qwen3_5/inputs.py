"""Videos in prompts of Qwen3.5. Their format is the same as Qwen3-VL's."""

from megavlm.models.qwen3_vl.inputs import extra_inputs, video_tokens

__all__ = ["extra_inputs", "video_tokens"]

"""Qwen2-VL's configuration as megatron-core's: its language model is Qwen2.5-VL's."""

from megavlm.models.qwen2_5_vl.config import architecture, rotary

__all__ = ["architecture", "rotary"]

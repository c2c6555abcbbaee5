"""Qwen2-VL's language model as plain values: they are Qwen2.5-VL's."""

from megavlm.models.qwen2_5_vl.config import architecture, language_sizes, rotary

__all__ = ["architecture", "language_sizes", "rotary"]

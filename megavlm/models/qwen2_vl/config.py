"""Language model of Qwen2-VL, as plain values; it is the same as Qwen2.5-VL's."""

from megavlm.models.qwen2_5_vl.config import architecture, language_sizes, rotary

__all__ = ["architecture", "language_sizes", "rotary"]

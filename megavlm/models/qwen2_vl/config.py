"""Qwen2-VL as plain values; they are the same as Qwen2.5-VL's."""

from megavlm.models.common.qwen_config import FOLDER_NAMES, patch_sizes
from megavlm.models.qwen2_5_vl.config import architecture, language_sizes, rotary

__all__ = ["FOLDER_NAMES", "architecture", "language_sizes", "patch_sizes", "rotary"]

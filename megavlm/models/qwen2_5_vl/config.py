"""Language model of Qwen2.5-VL and Qwen2-VL, as plain values."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import (
    Rotary,
    chunked_axes,
    dense_sizes,
    language_fields,
    rotary_parameters,
)
from megavlm.models.common.qwen_config import FOLDER_NAMES, patch_sizes

__all__ = ["FOLDER_NAMES", "architecture", "language_sizes", "patch_sizes", "rotary"]

# As in the released models; for a configuration without it, transformers has the same default.
MROPE_SECTION = (16, 24, 24)


def language_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that layout rules need. Raises KeyError with the name of a missing value."""
    return dense_sizes(text, head_dim=None)


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' Qwen2_5_VLConfig or Qwen2VLConfig. Raises
    ValueError for settings that are not implemented.
    """
    text = hf_config.text_config
    return language_fields(text, language_sizes(text.to_dict()), qkv_bias=True, qk_norm=False)


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding. Raises ValueError for one that is not implemented."""
    text = hf_config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    theta, section = rotary_parameters(text, head_dim, MROPE_SECTION)
    return Rotary(head_dim, theta, chunked_axes(section))

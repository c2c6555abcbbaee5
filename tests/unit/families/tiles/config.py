"""InternVL as plain values: Qwen2 with plain rotary embeddings, and a tower of square patches."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import (
    FolderNames,
    PatchSizes,
    Rotary,
    dense_sizes,
    language_fields,
)

FOLDER_NAMES = FolderNames(sizes={}, tokens={"image_token_id": "<IMG_CONTEXT>"})


def language_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that layout rules need."""
    return dense_sizes(text, head_dim=None)


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' InternVLConfig with Qwen2's text_config."""
    text = hf_config.text_config
    return language_fields(text, language_sizes(text.to_dict()), qkv_bias=True, qk_norm=False)


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding: all frequencies turn with one axis."""
    text = hf_config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    return Rotary(head_dim, text.rope_parameters["rope_theta"], (0,) * (head_dim // 2))


def patch_sizes(hf_config: Any) -> PatchSizes:
    """Return the sizes of the tower's input."""
    side = hf_config.vision_config.patch_size[0]
    return PatchSizes(side, 1, round(1 / hf_config.downsample_ratio))

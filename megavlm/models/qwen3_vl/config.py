"""Language model of Qwen3-VL, dense and MoE, as plain values."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import (
    Rotary,
    count,
    dense_sizes,
    expert_sizes,
    interleaved_axes,
    language_fields,
    rotary_parameters,
)
from megavlm.models.common.qwen_config import FOLDER_NAMES, patch_sizes

__all__ = ["FOLDER_NAMES", "architecture", "language_sizes", "patch_sizes", "rotary"]

# As in the released models; for a configuration without it, transformers has the same default.
MROPE_SECTION = (24, 20, 20)


def language_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that layout rules need. Raises KeyError with the name of a missing value."""
    sizes = dense_sizes(text, head_dim=text.get("head_dim"))
    layers = expert_layers(text)
    if any(layers):
        sizes |= expert_sizes(text, _num_experts(text), layers)
    return sizes


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' Qwen3VLConfig or Qwen3VLMoeConfig. Raises
    ValueError for settings that are not implemented.
    """
    text = hf_config.text_config
    fields = language_fields(text, language_sizes(text.to_dict()), qkv_bias=False, qk_norm=True)
    return fields | {"deepstack_levels": len(hf_config.vision_config.deepstack_visual_indexes)}


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding. Raises ValueError for one that is not implemented."""
    text = hf_config.text_config
    theta, section = rotary_parameters(text, text.head_dim, MROPE_SECTION)
    return Rotary(text.head_dim, theta, interleaved_axes(section))


def expert_layers(text: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with experts, 0 for each dense layer."""
    layers = count(text, "num_hidden_layers")
    if not text.get(_num_experts(text)):
        return [0] * layers
    dense_layers = text.get("mlp_only_layers") or ()
    step = text.get("decoder_sparse_step") or 1
    return [int(index not in dense_layers and (index + 1) % step == 0) for index in range(layers)]


def _num_experts(text: Mapping[str, Any]) -> str:
    """Return the key of the number of experts. transformers 5 writes another key than hub files
    have.
    """
    return "num_local_experts" if "num_local_experts" in text else "num_experts"

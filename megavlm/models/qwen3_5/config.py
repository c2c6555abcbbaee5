"""Language model of Qwen3.5, Qwen3.6 and Qwen3.8, dense and MoE, as plain values."""

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

__all__ = [
    "FOLDER_NAMES",
    "architecture",
    "language_sizes",
    "patch_sizes",
    "rotary",
    "served_config",
]

# As in the released models; for a configuration without them, transformers has the same defaults.
MROPE_SECTION = (11, 11, 10)
PARTIAL_ROTARY_FACTOR = 0.25
FULL_ATTENTION_INTERVAL = 4


def language_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that layout rules need. Raises KeyError with the name of a missing value."""
    sizes = {
        "attention_output_gate": True,
        "linear_attention_freq": linear_layers(text),
        "linear_num_key_heads": count(text, "linear_num_key_heads"),
        "linear_num_value_heads": count(text, "linear_num_value_heads"),
        "linear_key_head_dim": count(text, "linear_key_head_dim"),
        "linear_value_head_dim": count(text, "linear_value_head_dim"),
        "linear_conv_kernel_dim": count(text, "linear_conv_kernel_dim"),
    }
    if has_experts(text):  # no layer has a dense MLP
        text = {**text, "intermediate_size": count(text, "moe_intermediate_size")}
        sizes |= expert_sizes(text, "num_experts", [1] * count(text, "num_hidden_layers"))
        sizes["moe_shared_expert_intermediate_size"] = count(
            text, "shared_expert_intermediate_size"
        )
    return sizes | dense_sizes(text, head_dim=count(text, "head_dim"))


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' Qwen3_5Config or Qwen3_5MoeConfig. Raises
    ValueError for settings that are not implemented.
    """
    text = hf_config.text_config
    sizes = language_sizes(text.to_dict())
    return {
        **language_fields(text, sizes, qkv_bias=False, qk_norm=True),
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_gate": "num_moe_experts" in sizes,
    }


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding. It rotates only the first entries of a head. Raises ValueError
    for one that is not implemented.
    """
    text = hf_config.text_config
    factor = text.rope_parameters.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR)
    rotated = int(text.head_dim * factor)
    theta, section = rotary_parameters(text, rotated, MROPE_SECTION)
    return Rotary(rotated, theta, interleaved_axes(section))


def served_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json, completed by the values that SGLang 0.5.23 reads and
    transformers does not need. `full_attention_interval` is added if an interval describes which
    layers have attention.
    """
    text, vision = dict(values["text_config"]), dict(values["vision_config"])
    linear = linear_layers(text)
    interval = linear.index(0) + 1 if 0 in linear else len(linear) + 1
    if linear == linear_layers({**text, "layer_types": None, "full_attention_interval": interval}):
        text.setdefault("full_attention_interval", interval)
    rope = text.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR)
    if factor != PARTIAL_ROTARY_FACTOR:  # SGLang's default, too
        text.setdefault("partial_rotary_factor", factor)
    vision.setdefault("deepstack_visual_indexes", [])  # SGLang assumes three levels
    return {**values, "text_config": text, "vision_config": vision}


def has_experts(text: Mapping[str, Any]) -> bool:
    """Return True if the model is a mixture of experts. All its layers then have experts."""
    return bool(text.get("num_experts"))


def linear_layers(text: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with Gated DeltaNet, 0 for each layer with attention."""
    layers = count(text, "num_hidden_layers")
    if kinds := text.get("layer_types"):
        return [int(kind == "linear_attention") for kind in kinds]
    interval = text.get("full_attention_interval") or FULL_ATTENTION_INTERVAL
    return [int((index + 1) % interval != 0) for index in range(layers)]

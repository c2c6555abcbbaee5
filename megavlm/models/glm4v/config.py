"""Language models of GLM-4.1V and GLM-4.6V, dense and MoE, as plain values."""

from collections.abc import Mapping
from typing import Any

from megavlm.models.common.architecture import (
    FolderNames,
    Rotary,
    chunked_axes,
    count,
    dense_sizes,
    expert_sizes,
    language_fields,
    rotary_parameters,
)
from megavlm.models.common.qwen_config import FOLDER_NAMES as QWEN_NAMES
from megavlm.models.common.qwen_config import patch_sizes

__all__ = [
    "FOLDER_NAMES",
    "architecture",
    "expert_layers",
    "has_experts",
    "language_sizes",
    "patch_sizes",
    "rotary",
]

FOLDER_NAMES = FolderNames(
    sizes=QWEN_NAMES.sizes,
    tokens={
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
)

# As in the released models; for a configuration without it, transformers has the same default.
MROPE_SECTION = (8, 12, 12)


def language_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that layout rules need. Raises KeyError with the name of a missing value."""
    if not has_experts(text):
        return dense_sizes(text, head_dim=None)
    sizes = dense_sizes(text, head_dim=text.get("head_dim"))
    sizes |= expert_sizes(text, "n_routed_experts", expert_layers(text))
    shared = text.get("n_shared_experts", 1) * count(text, "moe_intermediate_size")
    return sizes | {"moe_shared_expert_intermediate_size": shared}


def architecture(hf_config: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields for transformers' Glm4vConfig or Glm4vMoeConfig. Raises
    ValueError for settings that are not implemented.
    """
    text = hf_config.text_config
    sizes = language_sizes(text.to_dict())
    if "num_moe_experts" not in sizes:
        fields = language_fields(text, sizes, qkv_bias=True, qk_norm=False)
        return fields | {"rotary_interleaved": True, "post_norms": True, "fused_gate_up": True}
    fields = language_fields(text, sizes, qkv_bias=text.attention_bias, qk_norm=False)
    return fields | {
        "moe_shared_expert_gate": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": text.routed_scaling_factor,
        "router_bias": True,
        **_groups(text),
    }


def rotary(hf_config: Any) -> Rotary:
    """Return the rotary embedding. It rotates only the first entries of a head. Raises ValueError
    for one that is not implemented.
    """
    text = hf_config.text_config
    head_dim = language_sizes(text.to_dict())["kv_channels"]
    rotated = int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0))
    theta, section = rotary_parameters(text, rotated, MROPE_SECTION)
    return Rotary(rotated, theta, chunked_axes(section))


def has_experts(text: Mapping[str, Any]) -> bool:
    """Return True if the model is a mixture of experts."""
    return bool(text.get("n_routed_experts"))


def expert_layers(text: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with experts, 0 for each dense layer. The first layers are dense."""
    layers, dense = count(text, "num_hidden_layers"), text.get("first_k_dense_replace", 1)
    return [int(index >= dense) for index in range(layers)]


def _groups(text: Any) -> dict[str, Any]:
    """Return LanguageConfig's fields of a router that chooses groups of experts first, by the sum
    of the two best scores in each. Raises ValueError if megatron-core would sum others.
    """
    if text.n_group == 1:
        return {}
    if text.num_experts_per_tok // text.topk_group != 2:
        raise ValueError(
            f"text_config.topk_group: {text.topk_group} of {text.n_group} groups for "
            f"num_experts_per_tok={text.num_experts_per_tok} experts is not supported; two experts "
            "in each group are"
        )
    return {"moe_router_num_groups": text.n_group, "moe_router_group_topk": text.topk_group}

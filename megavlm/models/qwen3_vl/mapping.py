"""Mapping of Qwen3-VL, dense and MoE, between hub tensors and this model's tensors."""

from collections.abc import Iterator
from typing import Any

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import (
    attention,
    eagle3_head,
    experts,
    language_model,
    mlp,
    tower,
)
from megavlm.models.qwen3_vl.config import expert_layers
from megavlm.models.qwen3_vl.vision import VisionTower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen3VLConfig or
    Qwen3VLMoeConfig.
    """
    return [
        *tower("model.visual", VisionTower, config),
        *text_entries(config, "model.language_model", transposed=True),
    ]


def draft_mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor of the EAGLE-3 draft head."""
    return [*eagle3_head(config.text_config)]


def text_entries(
    config: Any, hf_root: str, *, transposed: bool = False, separate: bool = False
) -> Iterator[Entry]:
    """Return the language model's entries. hf_root: Its prefix on the hub. transposed, separate:
    How the hub holds experts (mapping_parts.experts).
    """
    text = config.text_config
    has_experts = expert_layers(text.to_dict())

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from attention(
            text, megatron, hf, head_dim=text.head_dim, qkv_bias=False, qk_norm=True
        )
        if has_experts[index]:
            yield from experts(
                text, megatron, hf, text.num_experts, transposed=transposed, separate=separate
            )
        else:
            yield from mlp(text, megatron, hf)

    return language_model(config, hf_root, layer)

"""Mapping of Qwen3-VL, dense and MoE, between hub tensors and this model's tensors."""

from collections.abc import Iterator
from typing import Any

from megavlm.models.common.mapping import Entry, Shape
from megavlm.models.common.mapping_parts import (
    attention,
    experts,
    language_model,
    linear_shapes,
    mlp,
    norm_shapes,
    tower,
)
from megavlm.models.qwen3_vl.config import expert_layers


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen3VLConfig or
    Qwen3VLMoeConfig.
    """
    num_levels = len(config.vision_config.deepstack_visual_indexes)
    return [
        *tower_entries(config.vision_config, num_levels=num_levels),
        *text_entries(config, "model.language_model", transposed=True),
    ]


def tower_entries(vision: Any, *, num_levels: int) -> Iterator[Entry]:
    """Return the tower's entries. `num_levels` is the number of DeepStack levels."""
    return tower("model.visual", vision, vision.hidden_size, _vision_shapes(vision, num_levels))


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


def _vision_shapes(vision: Any, num_levels: int) -> dict[str, Shape]:
    size, ffn = vision.hidden_size, vision.intermediate_size
    merged = size * vision.spatial_merge_size**2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.bias": (size,),
        "pos_embed.weight": (vision.num_position_embeddings, size),
    }
    for index in range(vision.depth):
        block = f"blocks.{index}"
        shapes |= norm_shapes(f"{block}.norm1", size) | norm_shapes(f"{block}.norm2", size)
        shapes |= linear_shapes(f"{block}.attn.qkv", 3 * size, size)
        shapes |= linear_shapes(f"{block}.attn.proj", size, size)
        shapes |= linear_shapes(f"{block}.mlp.linear_fc1", ffn, size)
        shapes |= linear_shapes(f"{block}.mlp.linear_fc2", size, ffn)
    levels = [f"deepstack_merger_list.{i}" for i in range(num_levels)]
    for merger in ("merger", *levels):
        shapes |= norm_shapes(f"{merger}.norm", size if merger == "merger" else merged)
        shapes |= linear_shapes(f"{merger}.linear_fc1", merged, merged)
        shapes |= linear_shapes(f"{merger}.linear_fc2", vision.out_hidden_size, merged)
    return shapes

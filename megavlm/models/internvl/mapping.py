"""Mapping of InternVL3 and InternVL3.5 between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry, flattened, joined, same
from megavlm.models.common.mapping_parts import (
    attention,
    experts,
    language_model,
    mlp,
    weight_and_bias,
)
from megavlm.models.internvl.config import expert_layers, head_dim, merge_size, square_side


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' InternVLConfig."""
    return [*_tower(config.vision_config), *_merger(config), *_text(config)]


def _tower(vision: Any) -> Iterator[Entry]:
    size, patch, hub = vision.hidden_size, square_side(vision.patch_size), "vision_tower.embeddings"
    yield same("visual.cls_token", f"{hub}.cls_token", (1, 1, size))
    table = (1, (square_side(vision.image_size) // patch) ** 2 + 1, size)
    yield same("visual.position_embeddings", f"{hub}.position_embeddings", table)
    projection = f"{hub}.patch_embeddings.projection"
    shape = (size, vision.num_channels, patch, patch)
    yield flattened("visual.patch_embed.weight", f"{projection}.weight", shape)
    yield same("visual.patch_embed.bias", f"{projection}.bias", (size,))
    for index in range(vision.num_hidden_layers):
        yield from _block(f"visual.blocks.{index}", f"vision_tower.encoder.layer.{index}", vision)


def _block(megatron: str, hf: str, vision: Any) -> Iterator[Entry]:
    size, ffn = vision.hidden_size, vision.intermediate_size
    qkv = [f"{hf}.attention.{x}_proj" for x in "qkv"]
    yield joined(f"{megatron}.attn.qkv.weight", [f"{x}.weight" for x in qkv], (size, size))
    if vision.attention_bias:
        yield joined(f"{megatron}.attn.qkv.bias", [f"{x}.bias" for x in qkv], (size,))
    if vision.use_qk_norm:
        for x in "qk":
            source = f"{hf}.attention.{x}_norm.weight"
            yield same(f"{megatron}.attn.{x}_norm.weight", source, (size,))
    attn, attention = f"{megatron}.attn", f"{hf}.attention"
    yield from weight_and_bias(
        f"{attn}.projection_layer", f"{attention}.projection_layer", size, size
    )
    yield from weight_and_bias(f"{megatron}.mlp.fc1", f"{hf}.mlp.fc1", ffn, size)
    yield from weight_and_bias(f"{megatron}.mlp.fc2", f"{hf}.mlp.fc2", size, ffn)
    for number, norm in ((1, "layernorm_before"), (2, "layernorm_after")):
        yield same(f"{megatron}.norm{number}.weight", f"{hf}.{norm}.weight", (size,))
        if vision.norm_type == "layer_norm":
            yield same(f"{megatron}.norm{number}.bias", f"{hf}.{norm}.bias", (size,))
        yield same(f"{megatron}.scale{number}", f"{hf}.lambda_{number}", (size,))


def _merger(config: Any) -> Iterator[Entry]:
    hidden, hf = config.text_config.hidden_size, "multi_modal_projector"
    merged = config.vision_config.hidden_size * merge_size(config) ** 2
    yield from weight_and_bias("visual.merger.layer_norm", f"{hf}.layer_norm", merged)
    yield from weight_and_bias("visual.merger.linear_1", f"{hf}.linear_1", hidden, merged)
    yield from weight_and_bias("visual.merger.linear_2", f"{hf}.linear_2", hidden, hidden)


def _text(config: Any) -> Iterator[Entry]:
    text = config.text_config
    has_experts, is_qwen2 = expert_layers(text.to_dict()), text.model_type == "qwen2"

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        size = head_dim(text)
        yield from attention(
            text, megatron, hf, head_dim=size, qkv_bias=is_qwen2, qk_norm=not is_qwen2
        )
        if has_experts[index]:
            yield from experts(text, megatron, hf, text.num_experts, separate=True)
        else:
            yield from mlp(text, megatron, hf)

    for entry in language_model(config, "model", layer):
        yield replace(entry, hf=tuple(f"language_model.{name}" for name in entry.hf))

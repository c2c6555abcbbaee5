"""Mapping of MiniCPM-V 4.6 between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry, flattened, joined, same
from megavlm.models.common.mapping_parts import language_model, mlp, weight_and_bias
from megavlm.models.minicpmv.config import WINDOW
from megavlm.models.qwen3_5.config import linear_layers
from megavlm.models.qwen3_5.mapping import gated_attention, linear_attention

TOWER = "model.vision_tower"


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' MiniCPMV4_6Config."""
    return [*_tower(config.vision_config), *_mergers(config), *_text(config)]


def _tower(vision: Any) -> Iterator[Entry]:
    size, patch, hub = vision.hidden_size, vision.patch_size, f"{TOWER}.embeddings"
    shape = (size, vision.num_channels, patch, patch)
    yield flattened("visual.patch_embed.weight", f"{hub}.patch_embedding.weight", shape)
    yield same("visual.patch_embed.bias", f"{hub}.patch_embedding.bias", (size,))
    table = ((vision.image_size // patch) ** 2, size)
    yield same("visual.position_embedding.weight", f"{hub}.position_embedding.weight", table)
    for index in range(vision.num_hidden_layers):
        share = 1.0 if index <= vision.insert_layer_id else 1 / WINDOW**2
        for entry in _block(f"visual.blocks.{index}", f"{TOWER}.encoder.layers.{index}", vision):
            yield replace(entry, share=share)
    yield from weight_and_bias("visual.post_layernorm", f"{TOWER}.post_layernorm", size)


def _block(megatron: str, hf: str, vision: Any) -> Iterator[Entry]:
    size, ffn = vision.hidden_size, vision.intermediate_size
    yield from _attention(megatron, hf, size)
    yield from weight_and_bias(f"{megatron}.norm2", f"{hf}.layer_norm2", size)
    yield from weight_and_bias(f"{megatron}.mlp.fc1", f"{hf}.mlp.fc1", ffn, size)
    yield from weight_and_bias(f"{megatron}.mlp.fc2", f"{hf}.mlp.fc2", size, ffn)


def _mergers(config: Any) -> Iterator[Entry]:
    vision = config.vision_config
    size, count = vision.hidden_size, WINDOW**2
    merged, ffn = count * size, count * vision.intermediate_size
    megatron, hf = "visual.window_merger", f"{TOWER}.vit_merger"
    yield from _attention(megatron, hf, size)
    yield from weight_and_bias(f"{megatron}.norm2", f"{hf}.pre_norm", merged)
    yield from weight_and_bias(f"{megatron}.linear_1", f"{hf}.linear_1", ffn, merged)
    yield from weight_and_bias(f"{megatron}.linear_2", f"{hf}.linear_2", size, ffn)
    megatron, hf, hidden = "visual.merger", "model.merger.mlp.0", config.text_config.hidden_size
    yield from weight_and_bias(f"{megatron}.norm", f"{hf}.pre_norm", merged)
    yield from weight_and_bias(f"{megatron}.linear_1", f"{hf}.linear_1", merged, merged)
    yield from weight_and_bias(f"{megatron}.linear_2", f"{hf}.linear_2", hidden, merged)


def _text(config: Any) -> Iterator[Entry]:
    text = config.text_config
    is_linear = linear_layers(text.to_dict())

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from (linear_attention if is_linear[index] else gated_attention)(text, megatron, hf)
        yield from mlp(text, megatron, hf)

    return language_model(config, "model.language_model", layer)


def _attention(megatron: str, hf: str, size: int) -> Iterator[Entry]:
    """Yield the entries of attention in the tower, and of the norm before it."""
    yield from weight_and_bias(f"{megatron}.norm1", f"{hf}.layer_norm1", size)
    for kind, shape in (("weight", (size, size)), ("bias", (size,))):
        names = [f"{hf}.self_attn.{x}_proj.{kind}" for x in "qkv"]
        yield joined(f"{megatron}.attn.qkv.{kind}", names, shape)
    yield from weight_and_bias(f"{megatron}.attn.out_proj", f"{hf}.self_attn.out_proj", size, size)

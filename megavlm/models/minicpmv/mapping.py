"""Mapping of MiniCPM-V 4.6 between hub tensors and this model's tensors."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import language_model, mlp, tower
from megavlm.models.minicpmv.config import WINDOW
from megavlm.models.minicpmv.vision import VisionTower
from megavlm.models.qwen3_5.config import linear_layers
from megavlm.models.qwen3_5.mapping import gated_attention, linear_attention

# Parts of the tower's names here and on the hub.
NAMES = (
    (".patch_embed.", ".embeddings.patch_embedding."),
    (".position_embedding.", ".embeddings.position_embedding."),
    (".blocks.", ".encoder.layers."),
    (".attn.qkv.", ".self_attn.?_proj."),
    (".attn.", ".self_attn."),
    (".window_merger.norm2.", ".vit_merger.pre_norm."),
    (".window_merger.", ".vit_merger."),
    (".merger.norm.", ".merger.pre_norm."),
    (".vision_tower.merger.", ".merger.mlp.0."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
)


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' MiniCPMV4_6Config."""
    return [*_tower(config), *_text(config)]


def _tower(config: Any) -> Iterator[Entry]:
    vision = config.vision_config
    shape = (vision.hidden_size, vision.num_channels, vision.patch_size, vision.patch_size)
    convolutions = {"patch_embed.weight": shape}
    for entry in tower("model.vision_tower", VisionTower, config, convolutions, NAMES):
        block = re.match(r"visual\.blocks\.(\d+)\.", entry.megatron)
        is_merged = block is not None and int(block[1]) > vision.insert_layer_id
        yield replace(entry, share=1 / WINDOW**2) if is_merged else entry


def _text(config: Any) -> Iterator[Entry]:
    text = config.text_config
    is_linear = linear_layers(text.to_dict())

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from (linear_attention if is_linear[index] else gated_attention)(text, megatron, hf)
        yield from mlp(text, megatron, hf)

    return language_model(config, "model.language_model", layer)

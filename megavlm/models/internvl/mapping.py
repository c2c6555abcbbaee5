"""Mapping of InternVL3 and InternVL3.5 between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import (
    attention,
    experts,
    language_model,
    mlp,
    tower,
)
from megavlm.models.internvl.config import expert_layers, head_dim, square_side
from megavlm.models.internvl.vision import VisionTower

# Parts of the tower's names here and on the hub.
NAMES = (
    ("vision_tower.merger.", "multi_modal_projector."),
    (".cls_token", ".embeddings.cls_token"),
    (".position_embeddings", ".embeddings.position_embeddings"),
    (".patch_embed.", ".embeddings.patch_embeddings.projection."),
    (".blocks.", ".encoder.layer."),
    (".attn.qkv.", ".attention.?_proj."),
    (".attn.", ".attention."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".scale", ".lambda_"),
)


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' InternVLConfig."""
    vision = config.vision_config
    patch = square_side(vision.patch_size)
    convolutions = {"patch_embed.weight": (vision.hidden_size, vision.num_channels, patch, patch)}
    return [*tower("vision_tower", VisionTower, config, convolutions, NAMES), *_text(config)]


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

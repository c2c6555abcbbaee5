"""Mapping of InternVL between hub tensors and this model's tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megavlm.models.common.mapping import REPLICATED, Entry, Shape, flattened, same
from megavlm.models.common.mapping_parts import attention, language_model, mlp


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' InternVLConfig."""
    return [*_tower(config), *_merger(config), *_text(config)]


def _tower(config: Any) -> Iterator[Entry]:
    vision = config.vision_config
    size, patch, hub = vision.hidden_size, tuple(vision.patch_size), "vision_tower.embeddings"
    num_patches = (vision.image_size[0] // patch[0]) * (vision.image_size[1] // patch[1])
    yield same("visual.cls_token", f"{hub}.cls_token", (1, 1, size))
    table = (1, num_patches + 1, size)
    yield same("visual.position_embeddings", f"{hub}.position_embeddings", table)
    projection = f"{hub}.patch_embeddings.projection"
    shape = (size, vision.num_channels, *patch)
    yield flattened("visual.patch_embed.weight", f"{projection}.weight", shape)
    yield same("visual.patch_embed.bias", f"{projection}.bias", (size,))
    for index in range(vision.num_hidden_layers):
        yield from _block(f"visual.blocks.{index}", f"vision_tower.encoder.layer.{index}", vision)


def _block(ours: str, hub: str, vision: Any) -> Iterator[Entry]:
    size, ffn = vision.hidden_size, vision.intermediate_size
    for kind, columns in (("weight", (size,)), ("bias", ())):
        names = tuple(f"{hub}.attention.{x}_proj.{kind}" for x in "qkv")
        shapes: tuple[Shape, ...] = ((size, *columns),) * 3
        target = f"{ours}.attn.qkv.{kind}"
        yield Entry(target, names, shapes, _joined, _thirds, REPLICATED)
    for target, source, shape in (
        ("attn.proj", "attention.projection_layer", (size, size)),
        ("mlp.fc1", "mlp.fc1", (ffn, size)),
        ("mlp.fc2", "mlp.fc2", (size, ffn)),
        ("norm1", "layernorm_before", (size,)),
        ("norm2", "layernorm_after", (size,)),
    ):
        yield same(f"{ours}.{target}.weight", f"{hub}.{source}.weight", shape)
        yield same(f"{ours}.{target}.bias", f"{hub}.{source}.bias", shape[:1])
    for number in (1, 2):
        yield same(f"{ours}.scale{number}", f"{hub}.lambda_{number}", (size,))


def _merger(config: Any) -> Iterator[Entry]:
    hidden = config.text_config.hidden_size
    merged = config.vision_config.hidden_size * round(1 / config.downsample_ratio) ** 2
    for target, source, shape in (
        ("norm", "layer_norm", (merged,)),
        ("fc1", "linear_1", (hidden, merged)),
        ("fc2", "linear_2", (hidden, hidden)),
    ):
        hub = f"multi_modal_projector.{source}"
        yield same(f"visual.merger.{target}.weight", f"{hub}.weight", shape)
        yield same(f"visual.merger.{target}.bias", f"{hub}.bias", shape[:1])


def _text(config: Any) -> Iterator[Entry]:
    text = config.text_config
    head_dim = text.hidden_size // text.num_attention_heads

    def layer(_: int, megatron: str, hub: str) -> Iterator[Entry]:
        yield from attention(text, megatron, hub, head_dim=head_dim, qkv_bias=True, qk_norm=False)
        yield from mlp(text, megatron, hub)

    for entry in language_model(config, "model", layer):
        yield replace(entry, hf=tuple(f"language_model.{name}" for name in entry.hf))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts])


def _thirds(fused: Tensor) -> tuple[Tensor, ...]:
    return fused.chunk(3)

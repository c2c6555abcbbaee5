"""Qwen2-VL: hub tensor names against this model's tensors."""

from typing import Any

from megavlm.models.common.mapping import Entry, Shape
from megavlm.models.common.mapping_parts import layer_norm, linear, tower
from megavlm.models.qwen2_5_vl.mapping import text_entries


def mapping(config: Any) -> list[Entry]:
    """Every tensor of the model that `config`, a transformers Qwen2VLConfig, describes."""
    vision = config.vision_config
    return [
        *tower("visual", vision, vision.embed_dim, _vision_shapes(vision)),
        *text_entries(config),
    ]


def _vision_shapes(vision: Any) -> dict[str, Shape]:
    size = vision.embed_dim
    ffn = int(size * vision.mlp_ratio)
    shapes: dict[str, Shape] = {}
    for index in range(vision.depth):
        block = f"blocks.{index}"
        shapes |= layer_norm(f"{block}.norm1", size) | layer_norm(f"{block}.norm2", size)
        shapes |= linear(f"{block}.attn.qkv", 3 * size, size)
        shapes |= linear(f"{block}.attn.proj", size, size)
        shapes |= linear(f"{block}.mlp.fc1", ffn, size)
        shapes |= linear(f"{block}.mlp.fc2", size, ffn)
    merged = size * vision.spatial_merge_size**2
    shapes |= layer_norm("merger.ln_q", size)
    shapes |= linear("merger.mlp.0", merged, merged)
    shapes |= linear("merger.mlp.2", vision.hidden_size, merged)
    return shapes

"""Mapping of Qwen2-VL between hub tensors and this model's tensors."""

from typing import Any

from megavlm.models.common.mapping import Entry, Shape
from megavlm.models.common.mapping_parts import linear_shapes, norm_shapes, tower
from megavlm.models.qwen2_5_vl.mapping import text_entries


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen2VLConfig."""
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
        shapes |= norm_shapes(f"{block}.norm1", size) | norm_shapes(f"{block}.norm2", size)
        shapes |= linear_shapes(f"{block}.attn.qkv", 3 * size, size)
        shapes |= linear_shapes(f"{block}.attn.proj", size, size)
        shapes |= linear_shapes(f"{block}.mlp.fc1", ffn, size)
        shapes |= linear_shapes(f"{block}.mlp.fc2", size, ffn)
    merged = size * vision.spatial_merge_size**2
    shapes |= norm_shapes("merger.ln_q", size)
    shapes |= linear_shapes("merger.mlp.0", merged, merged)
    shapes |= linear_shapes("merger.mlp.2", vision.hidden_size, merged)
    return shapes

"""Mapping of Qwen2.5-VL between hub tensors and this model's tensors."""

from collections.abc import Iterator
from typing import Any

from megavlm.models.common.mapping import Entry, Shape
from megavlm.models.common.mapping_parts import attention, language_model, linear_shapes, mlp, tower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen2_5_VLConfig."""
    vision = config.vision_config
    return [
        *tower("visual", vision, vision.hidden_size, _vision_shapes(vision)),
        *text_entries(config),
    ]


def text_entries(config: Any) -> Iterator[Entry]:
    """Yield the entries of the language model of Qwen2.5-VL or Qwen2-VL."""
    text = config.text_config
    head_dim = text.hidden_size // text.num_attention_heads

    def layer(_: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from attention(text, megatron, hf, head_dim=head_dim, qkv_bias=True, qk_norm=False)
        yield from mlp(text, megatron, hf)

    return language_model(config, "model", layer)


def _vision_shapes(vision: Any) -> dict[str, Shape]:
    hidden, ffn = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, Shape] = {}
    for index in range(vision.depth):
        block = f"blocks.{index}"
        shapes |= {f"{block}.norm1.weight": (hidden,), f"{block}.norm2.weight": (hidden,)}
        shapes |= linear_shapes(f"{block}.attn.qkv", 3 * hidden, hidden)
        shapes |= linear_shapes(f"{block}.attn.proj", hidden, hidden)
        shapes |= linear_shapes(f"{block}.mlp.gate_proj", ffn, hidden)
        shapes |= linear_shapes(f"{block}.mlp.up_proj", ffn, hidden)
        shapes |= linear_shapes(f"{block}.mlp.down_proj", hidden, ffn)
    merged = hidden * vision.spatial_merge_size**2
    shapes["merger.ln_q.weight"] = (hidden,)
    shapes |= linear_shapes("merger.mlp.0", merged, merged)
    shapes |= linear_shapes("merger.mlp.2", vision.out_hidden_size, merged)
    return shapes

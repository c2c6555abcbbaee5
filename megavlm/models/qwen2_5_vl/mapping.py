"""Qwen2.5-VL: hub tensor names against this model's tensors."""

from collections.abc import Iterator
from typing import Any

from megavlm.models.common.mapping import (
    COLUMNS,
    REPLICATED,
    ROWS,
    Entry,
    flattened,
    fused_qkv,
    gated,
    same,
)


def mapping(config: Any) -> list[Entry]:
    """Every tensor of the model that `config`, a transformers Qwen2_5_VLConfig, describes.

    Where embeddings are tied there is no `lm_head` and no `output_layer`.
    """
    text = config.text_config
    embedding = (text.vocab_size, text.hidden_size)
    entries = [
        *_vision(config.vision_config),
        same(
            "language_model.embedding.word_embeddings.weight",
            "model.embed_tokens.weight",
            embedding,
            ROWS,
        ),
    ]
    for layer in range(text.num_hidden_layers):
        entries += _layer(text, f"language_model.decoder.layers.{layer}", f"model.layers.{layer}")
    entries.append(
        same(
            "language_model.decoder.final_layernorm.weight",
            "model.norm.weight",
            (text.hidden_size,),
        )
    )
    if not config.tie_word_embeddings:
        entries.append(
            same("language_model.output_layer.weight", "lm_head.weight", embedding, ROWS)
        )
    return entries


def _layer(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    hidden, ffn = text.hidden_size, text.intermediate_size
    num_groups = text.num_key_value_heads
    kv = hidden // text.num_attention_heads * num_groups
    attention, mlp = f"{megatron}.self_attention", f"{megatron}.mlp"

    # Transformer Engine's names: the norm belongs to the linear that follows it.
    yield same(
        f"{attention}.linear_qkv.layer_norm_weight", f"{hf}.input_layernorm.weight", (hidden,)
    )
    for kind, columns in (("weight", (hidden,)), ("bias", ())):
        names = [f"{hf}.self_attn.{x}_proj.{kind}" for x in "qkv"]
        yield fused_qkv(
            f"{attention}.linear_qkv.{kind}",
            names,
            [(rows, *columns) for rows in (hidden, kv, kv)],
            num_groups,
        )
    yield same(
        f"{attention}.linear_proj.weight",
        f"{hf}.self_attn.o_proj.weight",
        (hidden, hidden),
        COLUMNS,
    )

    yield same(
        f"{mlp}.linear_fc1.layer_norm_weight", f"{hf}.post_attention_layernorm.weight", (hidden,)
    )
    yield gated(
        f"{mlp}.linear_fc1.weight",
        f"{hf}.mlp.gate_proj.weight",
        f"{hf}.mlp.up_proj.weight",
        (ffn, hidden),
    )
    yield same(f"{mlp}.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", (hidden, ffn), COLUMNS)


def _vision(vision: Any) -> Iterator[Entry]:
    """The tower is replicated and keeps HF's names; only its patch embedding is a linear."""
    hidden, ffn = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield flattened(
        "visual.patch_embed.proj.weight", "visual.patch_embed.proj.weight", (hidden, *patch)
    )

    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(vision.depth):
        prefix = f"visual.blocks.{block}"
        shapes |= {f"{prefix}.norm1.weight": (hidden,), f"{prefix}.norm2.weight": (hidden,)}
        for name, rows, columns in (
            ("attn.qkv", 3 * hidden, hidden),
            ("attn.proj", hidden, hidden),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):
            shapes |= {f"{prefix}.{name}.weight": (rows, columns), f"{prefix}.{name}.bias": (rows,)}
    merged = hidden * vision.spatial_merge_size**2
    shapes["visual.merger.ln_q.weight"] = (hidden,)
    for name, rows in (("mlp.0", merged), ("mlp.2", vision.out_hidden_size)):
        shapes |= {
            f"visual.merger.{name}.weight": (rows, merged),
            f"visual.merger.{name}.bias": (rows,),
        }
    for name, shape in shapes.items():
        yield same(name, name, shape, REPLICATED)

"""Mapping of GLM-4.1V and GLM-4.6V, dense and MoE, between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megavlm.models.common.mapping import COLUMNS, GATED, Entry, same
from megavlm.models.common.mapping_parts import (
    attention,
    experts,
    language_model,
    mlp,
    shared_expert,
    tower,
)
from megavlm.models.glm4v.config import expert_layers, has_experts
from megavlm.models.glm4v.vision import VisionTower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Glm4vConfig or Glm4vMoeConfig."""
    vision = config.vision_config
    kernel = vision.spatial_merge_size
    shape = (vision.out_hidden_size, vision.hidden_size, kernel, kernel)
    convolutions = {"downsample.weight": shape}
    return [
        *tower("model.visual", VisionTower, config, convolutions),
        *_text_entries(config),
    ]


def _text_entries(config: Any) -> Iterator[Entry]:
    text = config.text_config
    values = text.to_dict()
    layers = expert_layers(values) if has_experts(values) else []

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        if not layers:
            return _dense_layer(text, megatron, hf)
        return _mixture_layer(text, megatron, hf, has_experts=layers[index] == 1)

    return language_model(config, "model.language_model", layer)


def _dense_layer(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    """Yield the entries of a layer with norms after attention and MLP. Its MLP has gate and up in
    one tensor on the hub.
    """
    hidden, ffn = text.hidden_size, text.intermediate_size
    head_dim = hidden // text.num_attention_heads
    yield from attention(text, megatron, hf, head_dim=head_dim, qkv_bias=True, qk_norm=False)
    for target, source in (
        ("self_attention.post_layernorm.weight", "post_self_attn_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ("mlp.post_layernorm.weight", "post_mlp_layernorm.weight"),
    ):
        yield same(f"{megatron}.{target}", f"{hf}.{source}", (hidden,))
    fused = f"{megatron}.mlp.linear_fc1.weight"
    yield same(fused, f"{hf}.mlp.gate_up_proj.weight", (2 * ffn, hidden), GATED)
    down = f"{megatron}.mlp.linear_fc2.weight"
    yield same(down, f"{hf}.mlp.down_proj.weight", (hidden, ffn), COLUMNS)


def _mixture_layer(text: Any, megatron: str, hf: str, *, has_experts: bool) -> Iterator[Entry]:
    """Yield the entries of a layer of the MoE model, with experts or with a dense MLP."""
    hidden, count = text.hidden_size, text.n_routed_experts
    head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    biased = text.attention_bias
    yield from attention(text, megatron, hf, head_dim=head_dim, qkv_bias=biased, qk_norm=False)
    if not has_experts:
        yield from mlp(text, megatron, hf)
        return
    # SGLang computes routers in fp32, from weights that it stores so.
    yield from experts(text, megatron, hf, count, separate=True, router_dtype=torch.float32)
    bias, source = f"{megatron}.mlp.router.expert_bias", f"{hf}.mlp.gate.e_score_correction_bias"
    yield replace(same(bias, source, (count,), dtype=torch.float32), frozen=True)
    ffn = text.n_shared_experts * text.moe_intermediate_size
    yield from shared_expert(megatron, f"{hf}.mlp.shared_experts", hidden, ffn)

"""Mapping of Qwen3.5, dense and MoE, between hub tensors and this model's tensors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megavlm.models.common.mapping import COLUMNS, ROWS, Entry, same
from megavlm.models.common.mapping_parts import (
    experts,
    language_model,
    mlp,
    shared_expert,
    tower,
)
from megavlm.models.linear_attention.fused_rows import (
    group_rows,
    join_gated,
    split_gated,
    ungroup_rows,
)
from megavlm.models.qwen3_5.config import has_experts, linear_layers
from megavlm.models.qwen3_5.vision import VisionTower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor of the model that is trained here. `config` is transformers'
    Qwen3_5Config or Qwen3_5MoeConfig.
    """
    return [*tower("model.visual", VisionTower, config), *_text_entries(config)]


def draft_mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor of the draft head. Its layer has attention."""
    text = config.text_config
    size = text.hidden_size
    names = {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "norm": "norm",
    }
    return [
        *(same(f"draft_head.{x}.weight", f"mtp.{hf}.weight", (size,)) for x, hf in names.items()),
        same("draft_head.fc.weight", "mtp.fc.weight", (size, 2 * size)),
        *gated_attention(text, "draft_head.layer", "mtp.layers.0"),
        *_mlp(text, "draft_head.layer", "mtp.layers.0"),
    ]


def _text_entries(config: Any) -> Iterator[Entry]:
    text = config.text_config
    is_linear = linear_layers(text.to_dict())

    def layer(index: int, megatron: str, hf: str) -> Iterator[Entry]:
        yield from (linear_attention if is_linear[index] else gated_attention)(text, megatron, hf)
        yield from _mlp(text, megatron, hf)

    return language_model(config, "model.language_model", layer)


def _mlp(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    if not has_experts(text.to_dict()):
        yield from mlp(text, megatron, hf)
        return
    yield from experts(text, megatron, hf, text.num_experts)
    source, ffn = f"{hf}.mlp.shared_expert", text.shared_expert_intermediate_size
    yield from shared_expert(megatron, source, text.hidden_size, ffn)
    gate = f"{megatron}.mlp.shared_experts.gate_weight"
    yield same(gate, f"{source}_gate.weight", (1, text.hidden_size))


def linear_attention(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    """Yield the entries of a layer's Gated DeltaNet, and of the norm before it."""
    hidden, groups = text.hidden_size, text.linear_num_key_heads
    keys, heads = groups * text.linear_key_head_dim, text.linear_num_value_heads
    values, width = heads * text.linear_value_head_dim, text.linear_conv_kernel_dim
    channels = (keys, keys, values)
    target, source = f"{megatron}.self_attention", f"{hf}.linear_attn"
    yield same(f"{target}.in_proj.layer_norm_weight", f"{hf}.input_layernorm.weight", (hidden,))
    yield Entry(
        f"{target}.in_proj.weight",
        tuple(f"{source}.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")),
        tuple((rows, hidden) for rows in (sum(channels), values, heads, heads)),
        partial(group_rows, groups, channels),
        partial(ungroup_rows, groups, (*channels, values, heads, heads)),
        ROWS,
    )
    yield Entry(
        f"{target}.conv_weight",
        (f"{source}.conv1d.weight",),
        ((sum(channels), 1, width),),
        partial(_group_channels, groups, channels),
        partial(_ungroup_channels, groups, channels),
        ROWS,
    )
    yield same(f"{target}.dt_bias", f"{source}.dt_bias", (heads,), ROWS)
    yield same(f"{target}.A_log", f"{source}.A_log", (heads,), ROWS, dtype=torch.float32)
    yield same(f"{target}.norm_weight", f"{source}.norm.weight", (text.linear_value_head_dim,))
    yield same(f"{target}.out_proj.weight", f"{source}.out_proj.weight", (hidden, values), COLUMNS)


def gated_attention(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    """Yield the entries of a layer's gated attention, and of the norm before it. The hub's q_proj
    has the query of each head followed by its gate; a group of `linear_qkv` has all its queries,
    then all its gates.
    """
    hidden, groups, size = text.hidden_size, text.num_key_value_heads, text.head_dim
    q, kv = text.num_attention_heads * size, groups * size
    target, source = f"{megatron}.self_attention", f"{hf}.self_attn"
    yield same(f"{target}.linear_qkv.layer_norm_weight", f"{hf}.input_layernorm.weight", (hidden,))
    yield Entry(
        f"{target}.linear_qkv.weight",
        tuple(f"{source}.{x}_proj.weight" for x in "qkv"),
        ((2 * q, hidden), (kv, hidden), (kv, hidden)),
        partial(join_gated, groups, size),
        partial(split_gated, groups, size),
        ROWS,
    )
    for x in "qk":
        yield same(f"{target}.{x}_layernorm.weight", f"{source}.{x}_norm.weight", (size,))
    yield same(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", (hidden, q), COLUMNS)


def _group_channels(groups: int, channels: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return group_rows(groups, channels, [tensor.flatten(1)])


def _ungroup_channels(groups: int, channels: Sequence[int], tensor: Tensor) -> tuple[Tensor, ...]:
    (grouped,) = ungroup_rows(groups, channels, tensor)
    return (grouped.unsqueeze(1),)

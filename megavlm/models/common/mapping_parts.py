"""Parts of a mapping that families share.

Megatron names are the names of Transformer Engine's layers: a norm belongs to the linear layer that
follows it, except before a router, where it has its own name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megavlm.models.common.eagle3 import captured_layers
from megavlm.models.common.mapping import (
    COLUMNS,
    EXPERT_COLUMNS,
    EXPERT_GATED,
    ROWS,
    Entry,
    Shape,
    flattened,
    fused_qkv,
    gated,
    joined,
    same,
    stacked,
)
from megavlm.parallel.fake import without_memory

Layer = Callable[[int, str, str], Iterable[Entry]]


def language_model(config: Any, hf: str, layer: Layer) -> Iterator[Entry]:
    """Yield the language model's entries. With tied embeddings there is neither an `lm_head` nor an
    `output_layer`.

    hf: Prefix of the names on the hub.
    layer: Function of a layer's number and of its prefixes in Megatron and on the hub. It returns
        the layer's entries.
    """
    text = config.text_config
    embedding = (text.vocab_size, text.hidden_size)
    megatron = "language_model.decoder"
    yield same(
        "language_model.embedding.word_embeddings.weight",
        f"{hf}.embed_tokens.weight",
        embedding,
        ROWS,
    )
    for index in range(text.num_hidden_layers):
        yield from layer(index, f"{megatron}.layers.{index}", f"{hf}.layers.{index}")
    yield same(f"{megatron}.final_layernorm.weight", f"{hf}.norm.weight", (text.hidden_size,))
    if not config.tie_word_embeddings:
        yield same("language_model.output_layer.weight", "lm_head.weight", embedding, ROWS)


def attention(
    text: Any, megatron: str, hf: str, *, head_dim: int, qkv_bias: bool, qk_norm: bool
) -> Iterator[Entry]:
    """Yield the entries of a layer's attention, and of the norm before it."""
    hidden, num_groups = text.hidden_size, text.num_key_value_heads
    q, kv = text.num_attention_heads * head_dim, num_groups * head_dim
    target, source = f"{megatron}.self_attention", f"{hf}.self_attn"
    yield same(f"{target}.linear_qkv.layer_norm_weight", f"{hf}.input_layernorm.weight", (hidden,))
    for kind, columns in (("weight", (hidden,)), ("bias", ()))[: 2 if qkv_bias else 1]:
        yield fused_qkv(
            f"{target}.linear_qkv.{kind}",
            [f"{source}.{x}_proj.{kind}" for x in "qkv"],
            [(rows, *columns) for rows in (q, kv, kv)],
            num_groups,
        )
    if qk_norm:
        for x in "qk":
            yield same(f"{target}.{x}_layernorm.weight", f"{source}.{x}_norm.weight", (head_dim,))
    yield same(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", (hidden, q), COLUMNS)


def eagle3_head(text: Any) -> Iterator[Entry]:
    """Yield the entries of an EAGLE-3 draft head. Its hub names are SGLang's after `mtp.`, without
    `model.`: updates name a draft model's weights so.
    """
    hidden, num_groups = text.hidden_size, text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    q, kv = text.num_attention_heads * head_dim, num_groups * head_dim
    inputs = len(captured_layers(text.num_hidden_layers))
    megatron, hf = "draft_head.layer", "mtp.layers.0"
    yield same("draft_head.fc.weight", "mtp.fc.weight", (hidden, inputs * hidden))
    for ours, theirs in (("embedding_norm", "input_layernorm"), ("hidden_norm", "hidden_norm")):
        target = f"{megatron}.input_layernorm.{ours}.weight"
        yield same(target, f"{hf}.{theirs}.weight", (hidden,))
    target, source = f"{megatron}.self_attention", f"{hf}.self_attn"
    yield fused_qkv(
        f"{target}.linear_qkv.weight",
        [f"{source}.{x}_proj.weight" for x in "qkv"],
        [(rows, 2 * hidden) for rows in (q, kv, kv)],
        num_groups,
    )
    yield same(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", (hidden, q), COLUMNS)
    yield from mlp(text, megatron, hf)
    yield same("draft_head.norm.weight", "mtp.norm.weight", (hidden,))


def mlp(text: Any, megatron: str, hf: str) -> Iterator[Entry]:
    """Yield the entries of a layer's dense MLP, and of the norm before it."""
    hidden, ffn = text.hidden_size, text.intermediate_size
    yield same(
        f"{megatron}.mlp.linear_fc1.layer_norm_weight",
        f"{hf}.post_attention_layernorm.weight",
        (hidden,),
    )
    yield gated(
        f"{megatron}.mlp.linear_fc1.weight",
        f"{hf}.mlp.gate_proj.weight",
        f"{hf}.mlp.up_proj.weight",
        (ffn, hidden),
    )
    yield same(
        f"{megatron}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", (hidden, ffn), COLUMNS
    )


def experts(
    text: Any,
    megatron: str,
    hf: str,
    count: int,
    *,
    transposed: bool = False,
    separate: bool = False,
    router_dtype: torch.dtype | None = None,
) -> Iterator[Entry]:
    """Yield the entries of a layer's router and `count` experts, and of the norm before them.

    transposed: Whether the hub's stacks hold the weights of experts as [in, out].
    separate: Whether the hub has a tensor for each expert, as `Entry.separate` says.
    router_dtype: Data type of the servers' routers.
    """
    hidden, ffn = text.hidden_size, text.moe_intermediate_size
    yield same(
        f"{megatron}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (hidden,)
    )
    router = same(f"{megatron}.mlp.router.weight", f"{hf}.mlp.gate.weight", (count, hidden))
    yield replace(router, server_dtype=router_dtype)
    # megatron-core has the same key for sequential and for grouped experts.
    target, stacks = f"{megatron}.mlp.experts.experts", f"{hf}.mlp.experts"
    gate_up, down = (count, 2 * ffn, hidden), (count, hidden, ffn)
    if transposed:
        gate_up, down = (count, hidden, 2 * ffn), (count, ffn, hidden)
    for linear, stack, shape, shard in (
        ("linear_fc1", "gate_up_proj", gate_up, EXPERT_GATED),
        ("linear_fc2", "down_proj", down, EXPERT_COLUMNS),
    ):
        names = f"{target}.{linear}.weight", f"{stacks}.{stack}"
        for number in range(count):
            entry = stacked(*names, shape, shard, number, transposed=transposed)
            yield replace(entry, separate=separate)


def shared_expert(megatron: str, hf: str, hidden: int, ffn: int) -> Iterator[Entry]:
    """Yield the entries of a layer's shared expert, used by every token.

    hf: Name of the shared expert on the hub. ffn: Its width.
    """
    target = f"{megatron}.mlp.shared_experts"
    yield gated(
        f"{target}.linear_fc1.weight",
        f"{hf}.gate_proj.weight",
        f"{hf}.up_proj.weight",
        (ffn, hidden),
    )
    yield same(f"{target}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, ffn), COLUMNS)


def tower(
    hf: str,
    make: Callable[[Any], nn.Module],
    config: Any,
    convolutions: Mapping[str, Shape] = MappingProxyType({}),
    names: Sequence[tuple[str, str]] = (),
) -> Iterator[Entry]:
    """Yield the entries of a tower whose tensors have the shapes of HF, except linear layers that
    are convolutions on the hub.

    hf: Prefix of the names on the hub. make: The family's VisionTower. config: transformers'
    configuration. convolutions: Shapes on the hub by the name of the weight, in addition to those
    of Qwen's patch embedding. names: Parts of names here and what the hub has instead, replaced one
    after the other. A `?` stands for q, k and v, three tensors whose rows follow each other here.
    """
    with without_memory():
        tensors = make(config).named_parameters()
    for name, tensor in tensors:
        megatron, source, shape = f"visual.{name}", f"{hf}.{name}", tuple(tensor.shape)
        for ours, theirs in names:
            source = source.replace(ours, theirs)
        if name == "patch_embed.proj.weight":
            vision = config.vision_config
            side = vision.patch_size
            patch = (vision.in_channels, vision.temporal_patch_size, side, side)
            yield flattened(megatron, source, (tensor.size(0), *patch))
        elif name in convolutions:
            yield flattened(megatron, source, convolutions[name])
        elif "?" in source:
            qkv = [source.replace("?", part) for part in "qkv"]
            yield joined(megatron, qkv, (shape[0] // 3, *shape[1:]))
        else:
            yield same(megatron, source, shape)

"""Backends of the core attention: functions of one signature, chosen by name.

"sdpa" is dense, tree by tree, and runs anywhere. "flash" (PyTorch's kernel) and
"transformer_engine" compute causal sequences of variable length: the keys of a shared prompt are
read once for each of its responses, without a mask. "flex" compiles the tree mask into its kernel
and skips blocks in which nothing is attended. Attention has no dropout.
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.models.common.pack_layout import PackLayout, Sequences, attends
from megavlm.parallel import platform

# Query [t, heads, D] of this rank's tokens, key and value [T, kv heads, D] of the pack, its layout
# and the factor of the scores; returns [t, heads, D].
Backend = Callable[[Tensor, Tensor, Tensor, PackLayout, float], Tensor]
# The same with keys and values in the order of the sequences.
Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, float], Tensor]


def choose_backend(name: str, dtype: torch.dtype) -> Backend:
    """Return a backend. Raises ValueError for an unknown name and one that cannot run here."""
    if name not in BACKENDS:
        raise ValueError(f"model.attention: {name!r} is unknown; use one of {', '.join(BACKENDS)}.")
    if name != "sdpa" and not platform.has_gpu():
        raise ValueError(f"model.attention: {name} needs a GPU; use sdpa on a CPU.")
    if name in ("flash", "transformer_engine") and dtype == torch.float32:
        raise ValueError(
            f"model.attention: {name} does not compute in float32; use sdpa or flex, or bfloat16."
        )
    if name == "transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        raise ValueError(
            "model.attention: transformer_engine is not installed; install it or use flash."
        )
    return BACKENDS[name]


def sdpa(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's dot-product attention, with a dense mask per tree and none for a sequence."""
    outputs = []
    for tree in layout.trees:
        output = F.scaled_dot_product_attention(
            _heads_first(query[tree.queries]),
            _heads_first(key[tree.keys]),
            _heads_first(value[tree.keys]),
            attn_mask=tree.mask,
            is_causal=tree.mask is None,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def flash(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's variable-length flash attention."""
    return by_sequences(query, key, value, layout, scale, _flash_kernel)


def transformer_engine(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float
) -> Tensor:
    """Run the kernel that Transformer Engine chooses for variable lengths (flash-attn or cuDNN)."""
    return by_sequences(query, key, value, layout, scale, _transformer_engine_kernel)


def by_sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float, kernel: Kernel
) -> Tensor:
    """Run tree attention through a kernel for causal sequences of variable length. Keys that
    several sequences share are gathered for each, and their gradients summed.
    """
    sequences = layout.sequences
    if sequences.key_index is not None:
        key, value = (x.index_select(0, sequences.key_index) for x in (key, value))
    return kernel(query, key, value, sequences, scale)


def _flash_kernel(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.12 added the argument; earlier versions accept fewer key heads without it.
    parameters = inspect.signature(varlen_attn).parameters
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    output = varlen_attn(
        query,
        key,
        value,
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.max_queries,
        sequences.max_keys,
        scale=scale,
        window_size=(-1, 0),  # causal
        **grouped,
    )
    assert isinstance(output, Tensor)  # log-sum-exps were not requested
    return output


def _transformer_engine_kernel(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    attention = _transformer_engine_attention(query.size(1), key.size(1), query.size(2), scale)
    return attention(
        query,
        key,
        value,
        cu_seqlens_q=sequences.query_bounds,
        cu_seqlens_kv=sequences.key_bounds,
        max_seqlen_q=sequences.max_queries,
        max_seqlen_kv=sequences.max_keys,
    ).view_as(query)


@cache
def _transformer_engine_attention(heads: int, kv_heads: int, head_dim: int, scale: float) -> Any:
    """Return the module for this rank's heads; all layers share it, since it has no parameters."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        softmax_scale=scale,
    )


def flex(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's FlexAttention with the tree mask."""
    from torch.nn.attention.flex_attention import flex_attention

    if layout.block_mask is None:
        layout.block_mask = _block_mask(layout)
    output = _compiled(flex_attention)(
        _heads_first(query),
        _heads_first(key),
        _heads_first(value),
        block_mask=layout.block_mask,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return output.squeeze(0).transpose(0, 1)


def _block_mask(layout: PackLayout) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    token_index, segment_ids, ancestors = layout.token_index, layout.segment_ids, layout.ancestors

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attends(token_index[query], key, segment_ids, ancestors)

    shape = (None, None, len(token_index), layout.num_tokens)  # any batch, any head
    return _compiled(create_block_mask)(mask, *shape, device=token_index.device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on a GPU, where the plain one would hold every score at once."""
    return torch.compile(function) if platform.has_gpu() else function


def _heads_first(x: Tensor) -> Tensor:
    """Transpose [t, heads, D] to [1, heads, t, D]."""
    return x.transpose(0, 1).unsqueeze(0)


BACKENDS: dict[str, Backend] = {
    "sdpa": sdpa,
    "flash": flash,
    "transformer_engine": transformer_engine,
    "flex": flex,
}

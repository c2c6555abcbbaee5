"""Backends of the core attention: functions with one signature, selected by name.

"sdpa" computes batches of causal sequences with a dense kernel and runs anywhere. "flash"
(PyTorch's kernel) and "transformer_engine" compute causal sequences of variable length, without a
mask. These three read the keys of a shared prompt once for each of its responses. "flex" compiles
the tree mask into its kernel and skips blocks in which nothing is attended. Attention has no
dropout.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.config.model import check_attention
from megavlm.models.common.pack_layout import PackLayout, Sequences, attends
from megavlm.models.common.varlen import varlen_attention
from megavlm.parallel import platform

# Arguments: query [t, heads, D] of this rank's tokens, key and value [T, kv heads, D] of the pack,
# the pack's layout and the scale of the scores. Returns [t, heads, D].
Backend = Callable[[Tensor, Tensor, Tensor, PackLayout, float], Tensor]
# The same, with keys and values in the order of the sequences.
Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, float], Tensor]


def choose_backend(name: str, dtype: torch.dtype) -> Backend:
    """Return a backend by its name. Raises ValueError if it cannot run here."""
    if name != "sdpa" and not platform.has_gpu():
        raise ValueError(f"model.attention: {name} needs a GPU; use sdpa on a CPU.")
    check_attention(name, str(dtype).removeprefix("torch."))
    if name == "transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        raise ValueError(
            "model.attention: transformer_engine is not installed; install it or use flash."
        )
    return BACKENDS[name]


def sdpa(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's dot-product attention over batches of causal sequences, with a dense mask. Keys
    that several sequences share are copied for each of them. Shapes as in `Backend`: query
    [t, heads, D], key and value [T, kv heads, D]; returns [t, heads, D].
    """
    batches, order = layout.batches
    outputs = []
    for batch in batches:
        output = F.scaled_dot_product_attention(
            _rows(query, batch.queries),
            _rows(key, batch.keys),
            _rows(value, batch.keys),
            attn_mask=batch.mask,
            is_causal=batch.mask is None,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    whole = torch.cat(outputs)
    return whole if order is None else whole.index_select(0, order)


def _rows(tokens: Tensor, index: Tensor | slice) -> Tensor:
    """Select tokens [T, heads, D] by an index [B, n], or by a slice for one sequence. Returns
    [B, heads, n, D].
    """
    if isinstance(index, slice):
        return tokens[index].transpose(0, 1)[None]
    return tokens.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def flash(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's variable-length flash attention. Returns [t, heads, D], as in `Backend`."""
    return by_sequences(query, key, value, layout, scale, _flash_kernel)


def transformer_engine(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float
) -> Tensor:
    """Run the kernel that Transformer Engine chooses for variable lengths (flash-attn or cuDNN).
    Returns [t, heads, D], as in `Backend`.
    """
    return by_sequences(query, key, value, layout, scale, _transformer_engine_kernel)


def by_sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float, kernel: Kernel
) -> Tensor:
    """Run tree attention with a kernel for causal sequences of variable length. Keys that several
    sequences share are copied for each of them, and their gradients are summed. Returns
    [t, heads, D], as in `Backend`.
    """
    sequences = layout.sequences
    if sequences.key_index is not None:
        key, value = (x.index_select(0, sequences.key_index) for x in (key, value))
    return kernel(query, key, value, sequences, scale)


def _flash_kernel(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    return varlen_attention(
        query,
        key,
        value,
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.max_queries,
        sequences.max_keys,
        scale=scale,
        is_causal=True,
    )


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
    """Return the module for this rank's heads. All layers share it, since it has no parameters."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        # Bottom right: the last query of a sequence is aligned with its last key.
        attn_mask_type="padding_causal_bottom_right",
        softmax_scale=scale,
    )


def flex(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Run PyTorch's FlexAttention with the tree mask. Returns [t, heads, D], as in `Backend`."""
    if layout.block_mask is None:
        layout.block_mask = _block_mask(layout)
    num_queries = len(query)
    query, key, value = (_heads_first(_pad(x, FLEX_TOKENS)) for x in (query, key, value))
    output = _compiled_flex(scale, query.size(1) != key.size(1))(
        query, key, value, layout.block_mask
    )
    return output.squeeze(0).transpose(0, 1)[:num_queries]


# Shorter packs are padded to this length. FlexAttention computes in blocks of 128, and
# torch.compile specialises on sizes of 1: a pack of one block, one token or one segment would
# compile a separate kernel.
FLEX_TOKENS = 129


@torch.no_grad()  # one kernel for passes with and without gradients
def _block_mask(layout: PackLayout) -> Any:
    """Return the block mask of a pack. Keys that pad it belong to a segment that nothing attends
    to.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    token_index = _pad(layout.token_index, FLEX_TOKENS)  # queries that pad the pack are token 0's
    segment_ids = _pad(layout.segment_ids, FLEX_TOKENS, len(layout.parents))
    ancestors = F.pad(layout.ancestors, (0, 1, 0, 1))

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attends(token_index[query], key, segment_ids, ancestors)

    shape = (None, None, len(token_index), len(segment_ids))  # any batch, any head
    return _compiled(create_block_mask)(mask, *shape, device=token_index.device)


@cache
def _compiled_flex(scale: float, enable_gqa: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
        return flex_attention(
            query, key, value, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa
        )

    return _compiled(attention)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU, compile a function once for tensors of all sizes: without compilation all scores
    would be in memory at once. If compilation fails, the function raises an error.
    """
    if not platform.has_gpu():
        return function
    from torch.fx.experimental import _config

    settings: Any = _config
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Two sizes that happen to be equal, for example the numbers of segments and of heads, must
        # not be compiled as one size.
        with settings.patch(use_duck_shape=False):
            return compiled(*args, **kwargs)

    return run


def _pad(x: Tensor, length: int, value: float = 0) -> Tensor:
    """Pad a tensor [n, ...] at its end to at least `length` rows."""
    missing = length - len(x)
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing), value=value) if missing > 0 else x


def _heads_first(x: Tensor) -> Tensor:
    """Transpose [t, heads, D] to [1, heads, t, D]."""
    return x.transpose(0, 1).unsqueeze(0)


BACKENDS: dict[str, Backend] = {
    "sdpa": sdpa,
    "flash": flash,
    "transformer_engine": transformer_engine,
    "flex": flex,
}

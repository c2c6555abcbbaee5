"""Backends of the core attention: functions of one signature, chosen by name.

"sdpa" is dense, many causal sequences at a time, and runs anywhere. "flash" (PyTorch's kernel) and
"transformer_engine" compute causal sequences of variable length, without a mask. In all three the
keys of a shared prompt are read once for each of its responses. "flex" compiles the tree mask into
its kernel and skips blocks in which nothing is attended. Attention has no dropout.
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
    """Run PyTorch's dot-product attention over batches of causal sequences, with a dense mask. Keys
    that several sequences share are gathered for each.
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
    """Return [B, heads, n, D] of tokens [T, heads, D] by an index [B, n], or a slice of one."""
    if isinstance(index, slice):
        return tokens[index].transpose(0, 1)[None]
    return tokens.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


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


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Run PyTorch's flash attention over B sequences of variable length, whose bounds are
    [B + 1] int32. Query [t, heads, D]; key and value [T, kv heads, D]. GPU only, no float32.
    """
    from torch.nn.attention import varlen

    # torch 2.12 added the argument; earlier versions accept fewer key heads without it.
    parameters = inspect.signature(varlen.varlen_attn).parameters
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    output = varlen.varlen_attn(
        query,
        key,
        value,
        query_bounds,
        key_bounds,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        **grouped,
    )
    assert isinstance(output, Tensor)  # log-sum-exps were not requested
    return output


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
    if layout.block_mask is None:
        layout.block_mask = _block_mask(layout)
    num_queries = len(query)
    query, key, value = (_heads_first(_pad(x, FLEX_TOKENS)) for x in (query, key, value))
    output = _compiled_flex(scale, query.size(1) != key.size(1))(
        query, key, value, layout.block_mask
    )
    return output.squeeze(0).transpose(0, 1)[:num_queries]


# FlexAttention computes in blocks of 128. A length of one block, of one token or of one segment
# would compile kernels of its own, for tensors without that dimension: there are always more.
FLEX_TOKENS = 129


@torch.no_grad()  # one kernel for passes with and without gradients
def _block_mask(layout: PackLayout) -> Any:
    """Return the mask of a pack, padded by keys of a segment that nothing attends to."""
    from torch.nn.attention.flex_attention import create_block_mask

    token_index = _pad(layout.token_index, FLEX_TOKENS)  # more queries of token 0
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
    """Compile a function once for tensors of all sizes, on a GPU, where the plain one would hold
    every score at once; where that failed it would raise an error.
    """
    if not platform.has_gpu():
        return function
    from torch.fx.experimental import _config

    settings: Any = _config
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Sizes that happen to be equal (of segments and of heads, say) are not the same size.
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

"""Variable-length attention kernels of GPUs, written out: the signatures, and what the real ones
refuse, of PyTorch's flash attention and of Transformer Engine 2.11's DotProductAttention.
"""

from typing import Any

import torch
from torch import Tensor

# Of inputs. Tests of exactness replace it by float64, in which all is computed here.
DTYPES = {torch.bfloat16, torch.float16}


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert return_aux is seqused_k is block_table is num_splits is None, "not written out"
    assert window_size in ((-1, -1), (-1, 0)) and type(window_size) is tuple
    assert enable_gqa or query.size(1) == key.size(1), "torch refuses fewer key heads"
    assert cu_seq_k is not None
    scale = query.size(2) ** -0.5 if scale is None else scale
    check_inputs(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)
    return sequence_by_sequence(
        query, key, value, cu_seq_q, cu_seq_k, scale, is_causal=window_size == (-1, 0)
    )


class DotProductAttention:
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        assert attention_dropout == 0.0 and window_size is None and tp_size == 1
        assert cp_group is None and not sequence_parallel and not return_max_logit
        assert (attention_type, softmax_type) == ("self", "vanilla")
        assert num_attention_heads % (num_gqa_groups or num_attention_heads) == 0
        assert isinstance(kv_channels, int)
        self.sizes = (num_attention_heads, num_gqa_groups or num_attention_heads, kv_channels)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        assert (qkv_format or self.qkv_format) == "thd"
        # "padding_causal" would align the first query with the first key.
        assert (attn_mask_type or self.attn_mask_type) == "padding_causal_bottom_right"
        assert attention_mask is cu_seqlens_q_padded is cu_seqlens_kv_padded is None
        assert core_attention_bias is alibi_slopes is inference_params is window_size is None
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape
        assert type(max_seqlen_q) is int and type(max_seqlen_kv) is int, "else it synchronizes"
        assert self.sizes == (query_layer.size(1), key_layer.size(1), query_layer.size(2))
        check_inputs(
            query_layer,
            key_layer,
            value_layer,
            cu_seqlens_q,
            cu_seqlens_kv,
            max_seqlen_q,
            max_seqlen_kv,
            self.scale,
        )
        return sequence_by_sequence(
            query_layer,
            key_layer,
            value_layer,
            cu_seqlens_q,
            cu_seqlens_kv,
            self.scale,
            is_causal=True,
        ).flatten(1)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
) -> None:
    assert query.dim() == key.dim() == value.dim() == 3 and key.shape == value.shape
    assert query.dtype == key.dtype == value.dtype and query.dtype in DTYPES
    assert query.size(1) % key.size(1) == 0
    assert query.size(2) == key.size(2) and query.size(2) % 8 == 0 and query.size(2) <= 256
    assert all(x.stride(2) == 1 for x in (query, key, value)), "the last dimension is contiguous"
    assert type(scale) is float
    for bounds, longest, total in (
        (query_bounds, max_queries, len(query)),
        (key_bounds, max_keys, len(key)),
    ):
        assert bounds.dtype == torch.int32 and bounds.dim() == 1 and bounds.is_contiguous()
        assert bounds.device == query.device
        # The longest may be any bound from above, but a kernel's work grows with it.
        assert type(longest) is int and longest == bounds.diff().max()
        assert bounds[0] == 0 and bounds[-1] == total and (bounds.diff() > 0).all()
    assert len(query_bounds) == len(key_bounds)
    assert (query_bounds.diff() <= key_bounds.diff()).all(), "a query without a key is NaN"


def sequence_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    num_queries, num_keys = query_bounds.diff().tolist(), key_bounds.diff().tolist()
    parts = zip(query.split(num_queries), key.split(num_keys), value.split(num_keys), strict=True)
    return torch.cat([dense(q, k, v, scale, is_causal=is_causal) for q, k, v in parts])


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    """Attention written out in float64, the last query beside the last key: [L, heads, D] with
    [K, kv heads, D].
    """
    group, dtype = query.size(1) // key.size(1), query.dtype
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("lhd,khd->hlk", query.double(), key) * scale
    if is_causal:
        later = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("hlk,khd->lhd", scores.softmax(-1), value).to(dtype)

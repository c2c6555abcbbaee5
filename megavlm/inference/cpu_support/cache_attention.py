"""Attention over SGLang's KV cache on a CPU, of many sequences at a time.

SGLang 0.5.23's `torch_native` backend calls the attention of each sequence and layer by itself: for
128 responses of a tiny model most of a server's time is the start of small operations. And it
computes the prefix again that a sequence shares with others. Here sequences of similar length are
the batch of one call, with their new tokens alone as queries.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention import torch_native_backend
from torch import Tensor

# Bounds of one call: cached tokens that are gathered, shorter sequences padded to the longest, and
# pairs of a new token and a cached one.
MOST_TOKENS, MOST_PAIRS = 2**16, 2**22


class CacheAttention(torch_native_backend.TorchNativeAttnBackend):
    """SGLang's own backend, but for plain attention over the cache."""

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if encoder_lens is None and is_plain(query, k_cache, options):
            lengths = seq_lens.tolist()
            # Rows are as long as the model's context: only what is used is gathered.
            caches = k_cache, v_cache, req_to_token[:, : max(lengths)][req_pool_indices]
            return attend(query, output, *caches, lengths, [1] * len(lengths), options["scaling"])
        place = req_to_token, req_pool_indices, seq_lens, encoder_lens
        return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *place, **options)

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if encoder_lens is None and options["causal"] and is_plain(query, k_cache, options):
            lengths, new = seq_lens.tolist(), extend_seq_lens.tolist()
            caches = k_cache, v_cache, req_to_token[:, : max(lengths)][req_pool_indices]
            return attend(query, output, *caches, lengths, new, options["scaling"])
        place = req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens
        return super()._run_sdpa_forward_extend(
            query, output, k_cache, v_cache, *place, encoder_lens, **options
        )


def is_plain(query: Tensor, k_cache: Tensor, options: dict[str, Any]) -> bool:
    """Return True for attention to all cached tokens of a sequence, in the cache's own type."""
    window = options.get("sliding_window_size")
    own = not options.get("is_cross_attn") and (window is None or window < 0)
    return own and query.dtype == k_cache.dtype


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    lengths: Sequence[int],
    new: Sequence[int],
    scale: float | None,
) -> Tensor:
    """Write the attention of all new tokens to `output` and return it.

    query, output: [T, heads, head size], the new tokens of each sequence one after the other.
    k_cache, v_cache: [slots, KV heads, head size]. slots: [S, longest] of each sequence's tokens,
    those beyond its length unused. lengths, new: [S] tokens of each sequence, and those of them
    that are new, at its end.
    """
    starts = [0, *accumulate(new)]
    for rows in calls(lengths, new):
        count, longest = new[rows[0]], lengths[rows[-1]]
        firsts = torch.tensor([starts[row] for row in rows])
        places = (firsts[:, None] + torch.arange(count)).flatten()
        own = torch.tensor([lengths[row] for row in rows])
        mine = slots[torch.tensor(rows), :longest]
        is_uneven = lengths[rows[0]] < longest
        if is_uneven:  # never read what another sequence wrote
            mine = torch.where(torch.arange(longest) < own[:, None], mine, mine[:, :1])
        is_causal, mask = count == longest and not is_uneven, None
        if not is_causal and (is_uneven or count > 1):  # [rows, 1, new tokens, tokens]
            last = own[:, None] - count + torch.arange(count)
            mask = torch.arange(longest) <= last[:, None, :, None]
        attended = F.scaled_dot_product_attention(
            query[places].unflatten(0, (-1, count)).transpose(1, 2),
            _gather(k_cache, mine),
            _gather(v_cache, mine),
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        )
        output[places] = attended.transpose(1, 2).flatten(0, 1)
    return output


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Return [rows, KV heads, tokens, head size]. Whole rows are copied, which is 16 times as fast
    as an index into three dimensions.
    """
    found = cache.flatten(1).index_select(0, slots.flatten())
    return found.unflatten(1, cache.shape[1:]).unflatten(0, slots.shape).transpose(1, 2)


def calls(lengths: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """Yield the sequences of each call, the longest last: they have as many new tokens, and are
    within the bounds together.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (new[row], lengths[row])):
        tokens = (len(rows) + 1) * lengths[row]
        within = tokens <= MOST_TOKENS and tokens * new[row] <= MOST_PAIRS
        if rows and (new[row] != new[rows[0]] or not within):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def install(module: ModuleType) -> None:
    """Make SGLang's `torch_native` backend CacheAttention. module: torch_native_backend."""
    module.TorchNativeAttnBackend = CacheAttention  # type: ignore[attr-defined]

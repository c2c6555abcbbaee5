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

    # SGLang gives without names, here as `place`: k_cache, v_cache, req_to_token, req_pool_indices,
    # seq_lens, for an extension extend_prefix_lens and extend_seq_lens, and encoder_lens.

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, *place: Any, **options: Any
    ) -> Tensor:
        if not is_plain(query, place, options):
            return super()._run_sdpa_forward_decode(query, output, *place, **options)
        return attend(query, output, place[:5], [1] * len(query), options["scaling"])

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, *place: Any, **options: Any
    ) -> Tensor:
        if not is_plain(query, place, options) or not options["causal"]:
            return super()._run_sdpa_forward_extend(query, output, *place, **options)
        return attend(query, output, place[:5], place[6].tolist(), options["scaling"])


def is_plain(query: Tensor, place: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return True for attention to all cached tokens of a sequence, in the cache's own type."""
    k_cache, encoder_lens, window = place[0], place[-1], options.get("sliding_window_size")
    own = encoder_lens is None and not options.get("is_cross_attn")
    return own and (window is None or window < 0) and query.dtype == k_cache.dtype


def attend(
    query: Tensor,
    output: Tensor,
    place: Sequence[Tensor],
    new: Sequence[int],
    scale: float | None,
) -> Tensor:
    """Write the attention of all new tokens to `output` and return it.

    query, output: [T, heads, head size], the new tokens of each sequence one after the other.
    place: k_cache and v_cache [slots, KV heads, head size]; req_to_token [requests, model's
    context], slots of each request's tokens, those beyond its length unused; [S] request of each
    sequence, and its tokens. new: [S] those of them that are new, at its end.
    """
    k_cache, v_cache, req_to_token, requests, seq_lens = place
    lengths = seq_lens.tolist()
    slots = req_to_token[:, : max(lengths)][requests]  # a copy, of what is used alone
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

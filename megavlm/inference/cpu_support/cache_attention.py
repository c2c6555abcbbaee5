"""Attention over SGLang's KV cache on a CPU, of many sequences at a time.

SGLang 0.5.23's `torch_native` backend calls the attention of each sequence and layer by itself: for
128 responses of a tiny model most of a server's time is the start of small operations. And it
computes the prefix again that a sequence shares with others. Here sequences of similar length are
the batch of one call, with their new tokens alone as queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

    _calls: "list[Call] | None" = None  # of this forward pass, the same in all layers

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._calls = None

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, *place: Any, **options: Any
    ) -> Tensor:
        if not is_plain(query, place, options):
            return super()._run_sdpa_forward_decode(query, output, *place, **options)
        return self._attend(query, output, place, [1] * len(query), options["scaling"])

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, *place: Any, **options: Any
    ) -> Tensor:
        if not is_plain(query, place, options) or not options["causal"]:
            return super()._run_sdpa_forward_extend(query, output, *place, **options)
        return self._attend(query, output, place, place[6].tolist(), options["scaling"])

    def _attend(
        self, query: Tensor, output: Tensor, place: Any, new: list[int], scale: float | None
    ) -> Tensor:
        k_cache, v_cache, req_to_token, requests, seq_lens = place[:5]
        if self._calls is None:
            self._calls = plan(req_to_token, requests, seq_lens.tolist(), new)
        return attend(query, output, k_cache, v_cache, self._calls, scale)


@dataclass
class Call:
    """Sequences of one call of attention, with as many new tokens each. new: [their new tokens]
    positions among all new ones. slots: [sequences, tokens] of the cache. mask: [sequences, 1, new
    tokens, tokens], True where one attends; None for all, or those before it if `is_causal`.
    """

    new: Tensor
    slots: Tensor
    mask: Tensor | None
    is_causal: bool


def is_plain(query: Tensor, place: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return True for attention to all cached tokens of a sequence, in the cache's own type."""
    k_cache, encoder_lens, window = place[0], place[-1], options.get("sliding_window_size")
    own = encoder_lens is None and not options.get("is_cross_attn")
    return own and (window is None or window < 0) and query.dtype == k_cache.dtype


def plan(
    req_to_token: Tensor, requests: Tensor, lengths: Sequence[int], new: Sequence[int]
) -> list[Call]:
    """Return the calls in which all sequences attend to their cached tokens.

    req_to_token: [requests, model's context] slots of each request's tokens, those beyond its
    length unused. requests, lengths, new: [S] of each sequence its request, its tokens, and those
    of them that are new, at its end.
    """
    slots = req_to_token[:, : max(lengths)][requests]  # a copy, of what is used alone
    starts = [0, *accumulate(new)]
    calls = []
    for rows in batches(lengths, new):
        count, longest = new[rows[0]], lengths[rows[-1]]
        firsts = torch.tensor([starts[row] for row in rows])
        own = torch.tensor([lengths[row] for row in rows])
        mine = slots[torch.tensor(rows), :longest]
        is_uneven = lengths[rows[0]] < longest
        if is_uneven:  # never read what another sequence wrote
            mine = torch.where(torch.arange(longest) < own[:, None], mine, mine[:, :1])
        is_causal, mask = count == longest and not is_uneven, None
        if not is_causal and (is_uneven or count > 1):
            last = own[:, None] - count + torch.arange(count)
            mask = torch.arange(longest) <= last[:, None, :, None]
        positions = (firsts[:, None] + torch.arange(count)).flatten()
        calls.append(Call(positions, mine, mask, is_causal))
    return calls


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    calls: Sequence[Call],
    scale: float | None,
) -> Tensor:
    """Write the attention of all new tokens to `output` and return it.

    query, output: [T, heads, head size], the new tokens of each sequence one after the other.
    k_cache, v_cache: [slots, KV heads, head size].
    """
    for call in calls:
        attended = F.scaled_dot_product_attention(
            query[call.new].unflatten(0, (len(call.slots), -1)).transpose(1, 2),
            _gather(k_cache, call.slots),
            _gather(v_cache, call.slots),
            attn_mask=call.mask,
            is_causal=call.is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        )
        output[call.new] = attended.transpose(1, 2).flatten(0, 1)
    return output


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Return [rows, KV heads, tokens, head size]. Whole rows are copied, which is 16 times as fast
    as an index into three dimensions.
    """
    found = cache.flatten(1).index_select(0, slots.flatten())
    return found.unflatten(1, cache.shape[1:]).unflatten(0, slots.shape).transpose(1, 2)


def batches(lengths: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
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

"""Attention over SGLang's KV cache on a CPU, for many sequences at a time.

The `torch_native` backend of SGLang 0.5.23 calls attention separately for each sequence and layer.
With 128 responses of a tiny model, most of a server's time is the overhead of small operations. It
also recomputes the prefix that a sequence shares with others. Here one call handles many sequences
(see cache_calls.py), with only their new tokens as queries.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from sglang.srt.layers.attention import torch_native_backend
from torch import Tensor

if TYPE_CHECKING:
    from megavlm.sglang_cpu.cache_calls import Call, plan
    from megavlm.sglang_cpu.speculation import chains
else:  # megavlm need not be importable in a server
    from cache_calls import Call, plan
    from speculation import chains


class CacheAttention(torch_native_backend.TorchNativeAttnBackend):
    """SGLang's own backend, with plain attention over the cache replaced."""

    # SGLang passes these arguments by position, here as `place`: k_cache, v_cache, req_to_token,
    # req_pool_indices, seq_lens, then only when extending extend_prefix_lens and extend_seq_lens,
    # and last encoder_lens.

    _calls: list[Call] | None = None  # of this forward pass, shared by all layers
    drafts = 0  # of a backend of draft steps: drafts that are in the cache when it attends

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._calls = None

    # SGLang passes to both q, k, v, layer, forward_batch, and save_kv_cache by position or name.
    def forward_extend(self, *inputs: Any, **options: Any) -> Tensor:
        batch = chains(inputs[4], 0)
        return super().forward_extend(*inputs[:4], batch, *inputs[5:], **options)

    def forward_decode(self, *inputs: Any, **options: Any) -> Tensor:
        batch = chains(inputs[4], self.drafts)
        return super().forward_decode(*inputs[:4], batch, *inputs[5:], **options)

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
            self._calls = plan(req_to_token, requests, seq_lens.tolist(), new, query.dtype)
        return attend(query, output, k_cache, v_cache, self._calls, scale)


def is_plain(query: Tensor, place: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return True for attention to all cached tokens of a sequence, in the cache's dtype."""
    k_cache, encoder_lens, window = place[0], place[-1], options.get("sliding_window_size")
    own = encoder_lens is None and not options.get("is_cross_attn")
    return own and (window is None or window < 0) and query.dtype == k_cache.dtype


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    calls: Sequence[Call],
    scale: float | None,
) -> Tensor:
    """Write the attention of all new tokens to `output` and return it.

    query, output: [T, heads, head size], the new tokens of all sequences, concatenated. k_cache,
    v_cache: [slots, KV heads, head size].
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
    """Return [rows, KV heads, tokens, head size]. index_select copies whole rows, 16 times as fast
    as indexing three dimensions.
    """
    found = cache.flatten(1).index_select(0, slots.flatten())
    return found.unflatten(1, cache.shape[1:]).unflatten(0, slots.shape).transpose(1, 2)


def install(module: Any) -> None:
    """Replace SGLang's `torch_native` backend by CacheAttention. module: torch_native_backend."""
    module.TorchNativeAttnBackend = CacheAttention

"""PyTorch implementations of the `sgl_kernel` functions that speculative decoding calls on a CPU.
Drafts are chains (speculative_eagle_topk=1), not trees.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, context: int
) -> None:
    """Give tokens [start, end) of each request their cache slots, which `slots` has in order."""
    counts = (end - start).tolist()
    ranges = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    for (request, first, last), own in zip(ranges, slots.split(counts), strict=True):
        req_to_token[request, first:last] = own


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    context: int,
    topk: int,
    count: int,
) -> None:
    """Write to `slots` the cache slots of `count` tokens after each request's own."""
    places = seq_lens[:, None] + torch.arange(topk * count)
    slots.copy_(req_to_token[requests[:, None], places].flatten())


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, context: int
) -> None:
    """Write to `slots` the cache slots of tokens [start, end) of each request."""
    ranges = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    found = torch.cat([req_to_token[request, first:last] for request, first, last in ranges])
    slots[: len(found)] = found


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    steps: int,
    width: int,
    mask_mode: int,
) -> None:
    """Write positions and links of chains of `width` tokens. `mask` is for trees only."""
    assert topk == 1, "on a CPU, drafts are chains: set speculative_eagle_topk=1"
    indices = torch.arange(width)
    positions.copy_((seq_lens[:, None] + indices).flatten())
    retrieve_index.copy_(torch.arange(len(seq_lens) * width).view(-1, width))
    retrieve_next_token[:, :-1] = indices[1:]


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **_: Any,
) -> None:
    """Accept drafts while they are the target model's tokens. candidates: [B, width], the last
    token and the drafts after it. target_predict: [B, width], the target's token after each.
    """
    is_right = candidates[:, 1:] == target_predict[:, :-1]
    accepted = is_right.long().cumprod(1).sum(1)
    places = torch.arange(candidates.numel()).view(candidates.shape)
    is_kept = torch.arange(candidates.shape[1]) <= accepted[:, None]
    predicts.copy_(target_predict.flatten())
    accept_token_num.copy_(accepted)
    accept_index.copy_(torch.where(is_kept, places, -1))


def fill_bonus_tokens_cpu(tokens: Tensor, counts: Tensor, last: Tensor, width: int) -> None:
    """Write each request's last accepted token to `last`."""
    last.copy_(tokens.view(-1, width).gather(1, counts[:, None].long() - 1)[:, 0])


def copy_all_layer_kv_cache_cpu(
    addresses: Tensor, sizes: Tensor, targets: Tensor, sources: Tensor
) -> None:
    """Copy cache slots in all layers. addresses, sizes: [buffers], of a buffer and of its slots."""
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(address + target * size, address + source * size, size)

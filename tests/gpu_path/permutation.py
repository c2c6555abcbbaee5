"""Transformer Engine's Triton kernels that permute the tokens of experts, in plain torch; Triton's
own interpreter takes minutes for what is a second here.
"""

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return [T, 2 E + 1], of which the first E columns are used: the row of each token's copy for
    an expert, -1 where it is not routed to. Rows are ordered by expert, then by token.
    """
    rows = routing_map.t().flatten().cumsum(0).view(num_experts, num_tokens).t() - 1
    rows = rows.where(routing_map, -1)
    unused = rows.new_full((num_tokens, num_experts + 1), -1)
    return torch.cat((rows, unused), dim=1).int()


def permute_with_mask_map(
    tokens: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: None,
) -> tuple[Tensor, None, Tensor | None]:
    """Copy tokens [T, H] to the rows of the map; likewise probabilities [T, E]."""
    assert scale is None
    token, expert, row = _routed_experts(row_id_map, num_experts)
    assert len(row) == num_out_tokens
    permuted = torch.empty_like(tokens[token]).index_copy_(0, row, tokens[token])
    if probs is None:
        return permuted, None, None
    routed = probs[token, expert]
    return permuted, None, torch.empty_like(routed).index_copy_(0, row, routed)


def unpermute_with_mask_map(
    rows: Tensor,
    row_id_map: Tensor,
    merging_probs: None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each token's rows [T, H], added in fp32, and probabilities [T, E]."""
    assert merging_probs is None, "experts have applied the probabilities"
    token, expert, row = _routed_experts(row_id_map, num_experts)
    tokens = rows.new_zeros(num_tokens, hidden_size, dtype=torch.float32)
    tokens = tokens.index_add_(0, token, rows[row].float()).to(rows.dtype)
    if permuted_probs is None:
        return tokens, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[token, expert] = permuted_probs[row]
    return tokens, probs


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Return the row [T] that each token has once its chunks are in the order of the indices."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    order = torch.cat([chunks[index] for index in sorted_indices.tolist()])
    return torch.empty_like(order).index_copy_(0, order, torch.arange(num_tokens)).int()


def sort_chunks_by_map(
    tokens: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Move tokens [T, H] and probabilities [T] to the rows of the map, or back."""
    source = row_id_map.argsort() if is_forward else row_id_map.long()
    return tokens[source], None if probs is None else probs[source]


def _routed_experts(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, expert and row of each copy."""
    rows = row_id_map[:, :num_experts]
    token, expert = (rows >= 0).nonzero(as_tuple=True)
    return token, expert, rows[token, expert].long()

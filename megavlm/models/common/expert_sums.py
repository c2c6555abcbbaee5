"""Tokens on their way to experts and back, without atomic additions.

Of a layer's k copies of a token, megatron-core adds the experts' outputs in the forward pass, and
the gradients in the backward pass. On a GPU it does so with atomics, in an order that differs from
run to run: two passes over the same pack would give different log-probs. Here both are one gather
and one sum, in the order of the experts. Transformer Engine's fused kernels have a fixed order of
their own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor


def install() -> None:
    """Make megatron-core's token dispatchers use `permute` and `unpermute` of this module."""
    token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a copy of each token for each of its experts, as megatron-core's permute does.

    Args:
        tokens: [T, H].
        routing_map: [T, experts] bool, True at the k experts of each token.
        probs: [T, experts], or None.

    Returns:
        The copies [T * k, H] in the order of the experts, their probs, and their tokens.
    """
    if options.get("fused"):
        return moe_utils.permute(tokens, routing_map, probs, **options)
    assert not options.get("drop_and_pad"), "a token may have fewer than k experts"
    chosen = routing_map.bool().T.contiguous()
    token_of = torch.arange(len(tokens), device=tokens.device).expand(len(chosen), -1)
    index = token_of.masked_select(chosen)
    weights = None if probs is None else probs.T.contiguous().masked_select(chosen)
    return _Copies.apply(tokens, index), weights, index


def unpermute(copies: Tensor, index: Tensor, restore_shape: torch.Size, **options: Any) -> Tensor:
    """Return the sum [T, H] of each token's copies, as megatron-core's unpermute does."""
    if options.get("fused"):
        return moe_utils.unpermute(copies, index, restore_shape, **options)
    assert options.get("probs") is None, "experts have multiplied their outputs by them"
    return _Sums.apply(copies, index, restore_shape[0])


def _sums(copies: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    order = index.argsort(stable=True)
    experts = len(index) // max(num_tokens, 1)
    # It adds the rows of a bag one after the other.
    return F.embedding_bag(order.view(num_tokens, max(experts, 1)), copies, mode="sum")


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: Tensor, index: Tensor) -> Tensor:
        context.save_for_backward(index)
        context.num_tokens = len(tokens)
        return tokens.index_select(0, index)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = context.saved_tensors
        return _sums(grad, index, context.num_tokens), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, copies: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        context.save_for_backward(index)
        return _sums(copies, index, num_tokens)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = context.saved_tensors
        return grad.index_select(0, index), None, None

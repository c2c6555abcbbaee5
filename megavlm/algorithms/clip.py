"""PPO's clipped surrogate (arXiv 1707.06347)."""

import torch
from torch import Tensor

from megavlm.algorithms.ratios import PolicyTerm, ratios


def clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); bounds set apart are DAPO's
    clip-higher (arXiv 2503.14476). All tensors are [N]; the gradient flows through `logprobs`
    alone.

    dual_clip c > 1: where A < 0 the loss is at most -c A (arXiv 1912.09729), so that one token with
    a huge ratio cannot dominate.
    """
    ratio = ratios(logprobs, old_logprobs)
    return clip_ratio(ratio, advantages, clip_low, clip_high, dual_clip)


def clip_ratio(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyTerm:
    """The surrogate of a ratio that may be of tokens or of sequences."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    active = bounded.detach() > free.detach()
    loss = torch.maximum(free, bounded)
    dual = torch.zeros_like(active)
    if dual_clip is not None:
        most = -dual_clip * advantages
        dual = (advantages < 0) & (loss.detach() > most)
        loss = loss.where(~dual, most)
    return PolicyTerm(
        loss=loss,
        ratio=ratio.detach(),
        low=active & (advantages < 0) & ~dual,
        high=active & (advantages > 0),
        dual=dual,
    )

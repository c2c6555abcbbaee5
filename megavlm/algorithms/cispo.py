"""CISPO: clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585)."""

from torch import Tensor

from megavlm.algorithms.ratios import PolicyTerm, ratios


def weighted_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyTerm:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p. All tensors [N].

    A token whose ratio is beyond a bound keeps its gradient, with the bound as its weight. The
    paper sets no lower bound: clip_low=1.
    """
    ratio = ratios(logprobs, old_logprobs).detach()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    return PolicyTerm(
        loss=-weights * advantages * logprobs, ratio=ratio, low=low, high=high, dual=low & high
    )

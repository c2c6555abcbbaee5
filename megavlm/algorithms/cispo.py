"""CISPO: clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585)."""

import torch

from megavlm.algorithms.policy_loss import PolicyInputs, PolicyTerm, ratios
from megavlm.config.algorithm import PolicyOptimization


def cispo(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Compute -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p per token.

    A token whose ratio is beyond a bound keeps its gradient, with the bound as its weight. The
    paper sets no lower bound: clip_low=1.
    """
    ratio = ratios(inputs.logprobs, inputs.old_logprobs).detach()
    least, most = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    low, high = ratio < least, ratio > most
    none = torch.zeros_like(low)
    loss = -ratio.clamp(least, most) * inputs.advantages * inputs.logprobs
    return PolicyTerm(loss=loss, ratio=ratio, low=low, high=high, dual=none, stopped=none)

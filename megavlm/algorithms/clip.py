"""PPO's clipped surrogate (arXiv 1707.06347)."""

import torch
from torch import Tensor

from megavlm.algorithms.policy_loss import PolicyInputs, PolicyTerm, ratios
from megavlm.config.algorithm import PolicyOptimization


def clip(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Compute -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) per token. A `clip_high`
    above `clip_low` is DAPO's clip-higher (arXiv 2503.14476).
    """
    return clip_ratio(ratios(inputs.logprobs, inputs.old_logprobs), inputs.advantages, settings)


def clip_ratio(ratio: Tensor, advantages: Tensor, settings: PolicyOptimization) -> PolicyTerm:
    """Compute the surrogate for ratios [N] of tokens or of sequences.

    With dual_clip c > 1 the loss is at most -c A where A < 0 (arXiv 1912.09729), so that one token
    with a huge ratio cannot dominate.
    """
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    active = bounded.detach() > free.detach()
    loss = torch.maximum(free, bounded)
    dual = torch.zeros_like(active)
    if settings.dual_clip is not None:
        most = -settings.dual_clip * advantages
        dual = (advantages < 0) & (loss.detach() > most)
        loss = loss.where(~dual, most)
    low = active & (advantages < 0) & ~dual
    high = active & (advantages > 0)
    return PolicyTerm(
        loss=loss, ratio=ratio.detach(), low=low, high=high, dual=dual, stopped=low | high | dual
    )

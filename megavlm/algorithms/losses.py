"""Loss terms per target token, [N]. The caller sums them and divides by its denominator."""

import torch
from torch import Tensor

from megavlm.algorithms.kl import LOG_RATIO_LIMIT


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347), bounds set apart as in DAPO (arXiv 2503.14476).

    All tensors are [N]; the gradient flows through `logprobs` alone. Returns the loss per token and
    whether the bound is active there, which is where the token's gradient is zero.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free, bounded), bounded.detach() > free.detach()


def entropy_bonus(entropies: Tensor, coefficient: float) -> Tensor:
    """What is added to the loss to reward entropy: -coefficient * entropy. entropies: [N], nats."""
    return -coefficient * entropies


def negative_log_likelihood(logprobs: Tensor) -> Tensor:
    """The supervised loss per token. logprobs: [N]."""
    return -logprobs

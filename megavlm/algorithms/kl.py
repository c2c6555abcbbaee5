"""Estimators of KL(policy || reference) per token, from tokens that the policy sampled.

Source: John Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k1 is
unbiased with high variance and can be negative; k2 is biased and small; k3 is unbiased and never
negative. As a term of a loss, k2 has the unbiased gradient on the policy's own samples; k3 is what
GRPO uses.
All arguments and results are [N] log-probs in nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# exp(20) is 5e8: a larger ratio says only "far apart", and exp(89) would overflow float32.
LOG_RATIO_LIMIT = 20.0


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log p - log q."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p), with log(q/p) held within LOG_RATIO_LIMIT (no gradient outside of it)."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of that name; an unknown name is a ValueError."""
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    if name not in estimators:
        raise ValueError(
            f"algorithm.kl_estimator={name!r} is unknown: choose one of {', '.join(estimators)}."
        )
    return estimators[name]

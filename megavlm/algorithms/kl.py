"""Estimators of KL(policy || reference) per token, from tokens that the policy sampled.

Source: John Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k1 is
unbiased with high variance and can be negative; its own gradient is zero on average, so it belongs
in the reward. k2 is biased, with low variance; k3 is unbiased and never negative. In a loss, k2 has
an unbiased gradient on the policy's own samples; k3, which GRPO uses, has a biased one.
All arguments and results are [N] log-probs in nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megavlm.algorithms.policy_loss import LOG_RATIO_LIMIT, ratios


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log p - log q."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p), log(q/p) held within LOG_RATIO_LIMIT (no gradient outside)."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def unbiased(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return k3 times p / p_old, where p_old is the policy that sampled.

    Value and gradient are unbiased, also after updates (DeepSeek-V3.2, arXiv 2512.02556). The
    gradient is (p / p_old) (log p - log q) grad(log p).
    """
    return ratios(logprobs, old_logprobs) * k3(logprobs, reference_logprobs)


def estimator(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the estimator of that name, a function of (log-probs, reference log-probs, old
    log-probs).
    """
    plain = {"k1": k1, "k2": k2, "k3": k3}
    if name == "unbiased":
        return unbiased
    return lambda logprobs, reference, old: plain[name](logprobs, reference)


def adapted(coefficient: float, kl: float, *, target: float, horizon: int, samples: int) -> float:
    """Return the next coefficient of an adaptive controller (arXiv 1909.08593, section 2.2): higher
    if the measured `kl` is above the target, lower if it is below, by at most a fifth per `horizon`
    sampled responses.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)

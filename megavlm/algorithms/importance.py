"""The rollout engine's log-probs differ a little from the trainer's, for equal tokens and weights.

Truncated importance sampling (fengyao.notion.site/off-policy-rl, 2025) weights each token's loss by
the ratio of the two, capped so that one badly predicted token cannot dominate.
"""

import torch
from torch import Tensor


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_rollout, cap) per token, without gradient. All [N], log-probs in nats."""
    return (old_logprobs - rollout_logprobs).detach().exp().clamp(max=cap)


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """How far the two engines are apart, on tokens that the rollout engine sampled.

    Returns the k3 estimate of KL(rollout || trainer) per token, [N], and the largest absolute
    log-prob difference, a scalar tensor (zero for N = 0). Sums and maxima over ranks are the
    caller's.
    """
    difference = (old_logprobs - rollout_logprobs).detach()
    largest = difference.abs().amax() if difference.numel() else difference.new_zeros(())
    return torch.expm1(difference) - difference, largest

"""Importance correction for the gap between rollout engine and trainer.

Their log-probs differ even for equal tokens and weights. The loss gets importance weights per token
or per sequence, truncated (TIS, Yao et al., fengyao.notion.site/off-policy-rl, 2025) or masked
(IcePop, arXiv 2510.18855), and whole sequences can be rejected.

Log-probs are [N], in nats, of tokens that the rollout engine sampled. ids [N]: the sequence of each
token, in 0..num-1. `reduce` sums over ranks that hold parts of the same sequences. No result has a
gradient.
"""

import torch
from torch import Tensor

from megavlm.algorithms.policy_loss import LOG_RATIO_LIMIT
from megavlm.algorithms.segments import Reduce, identity, segment_mean, segment_sum


def token_ratios(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return p_trainer / p_rollout of each token [N]."""
    return _exp((old_logprobs - rollout_logprobs).detach())


def sequence_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ids: Tensor,
    num: int,
    reduce: Reduce = identity,
) -> Tensor:
    """Return for each token [N] the ratio of its whole sequence: the product of the ratios of the
    sequence's tokens.
    """
    difference = (old_logprobs - rollout_logprobs).detach()
    return _exp(segment_sum(difference, ids, num, reduce))[ids]


def truncated(ratios: Tensor, cap: float) -> Tensor:
    """Return min(ratio, cap) [N]: one badly predicted token cannot dominate."""
    return ratios.clamp(max=cap)


def masked(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Return the ratios [N], with 0 for those outside of floor..cap."""
    return ratios.where((ratios >= floor) & (ratios <= cap), 0.0)


def rejected(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ids: Tensor,
    num: int,
    *,
    below: float | None,
    above: float | None,
    reduce: Reduce = identity,
) -> Tensor:
    """Return [N] bool, True for tokens of sequences whose ratio per token (the geometric mean) is
    outside of below..above. None means that there is no such bound.
    """
    difference = (old_logprobs - rollout_logprobs).detach()
    means = _exp(segment_mean(difference, ids, num, reduce))
    outside = torch.zeros_like(means, dtype=torch.bool)
    if below is not None:
        outside |= means < below
    if above is not None:
        outside |= means > above
    return outside[ids]


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Measure how far the two engines are apart.

    Returns the k3 estimate of KL(rollout || trainer) per token, [N], and the largest absolute
    log-prob difference, a scalar tensor (zero for N = 0). The caller reduces both over ranks.
    """
    difference = (old_logprobs - rollout_logprobs).detach()
    largest = difference.abs().amax() if difference.numel() else difference.new_zeros(())
    return torch.expm1(difference) - difference, largest


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

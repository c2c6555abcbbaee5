"""Probability ratios of the policy to the one that made the samples, and what a clipped loss tells.

All tensors are [N], log-probs in nats.
"""

from dataclasses import dataclass

from torch import Tensor

# exp(20) is 5e8: a larger ratio says only "far apart", and exp(89) would overflow float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyTerm:
    """The loss per token, the ratio that it uses, and where a bound is active, which is where the
    token's gradient is zero (in CISPO: where its weight is the bound's). `dual`: where the dual
    clip is.
    """

    loss: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor

    @property
    def clipped(self) -> Tensor:
        return self.low | self.high | self.dual


def ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """p / p_old per token, with log p - log p_old held within LOG_RATIO_LIMIT (no gradient outside
    of it).
    """
    difference = logprobs - old_logprobs.detach()
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

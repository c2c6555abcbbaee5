"""Interface of policy losses: their inputs, their return value, and probability ratios.

A policy loss is a function of (PolicyInputs, the `algorithm` section) that returns a PolicyTerm.
Built-in ones are named in registry.py; a recipe names one of your own by import path:
`algorithm.policy_loss: my_package.module:function`. For example

    def plain(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
        ratio = ratios(inputs.logprobs, inputs.old_logprobs)
        return PolicyTerm.unclipped(-ratio * inputs.advantages, ratio)

Further parameters are options: `algorithm.options: {scale: 2.0}` is given to a function with a
parameter `scale`. The trainer multiplies the loss of each token by its importance weight, adds the
KL and entropy terms, and aggregates as `algorithm.loss_aggregation` says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megavlm.algorithms.segments import Reduce, identity
from megavlm.config.algorithm import PolicyOptimization

# exp(20) is 5e8: a larger ratio carries no more information, and exp(89) would overflow
# float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Tokens of a pack that this rank holds. Log-probs are in nats."""

    logprobs: Tensor
    """[N], log-probs of the policy that is trained; the only tensor with a gradient."""

    old_logprobs: Tensor
    """[N], log-probs of the policy that sampled."""

    advantages: Tensor
    """[N]."""

    sequence_ids: Tensor
    """[N] int64, the sequence of each token, in 0..num_sequences-1."""

    num_sequences: int
    """Upper bound on the number of sequences."""

    reduce: Reduce = identity
    """Sums a tensor over the context-parallel ranks, which hold other tokens of the same
    sequences. Collective."""


@dataclass(frozen=True, kw_only=True)
class PolicyTerm:
    """Loss of each token, with values for the metrics. All tensors are [N]."""

    loss: Tensor
    """Loss of each token, before importance weights."""

    ratio: Tensor
    """Probability ratio that the loss uses, without gradient."""

    low: Tensor
    """Bool, True if the lower bound of the ratio is active."""

    high: Tensor
    """Bool, True if the upper bound of the ratio is active."""

    dual: Tensor
    """Bool, True if the dual clip is active."""

    stopped: Tensor
    """Bool, True if a bound removes the gradient."""

    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further values per token, reported as their mean under policy_loss/NAME."""

    @property
    def clipped(self) -> Tensor:
        """Bool [N], True if any bound is active."""
        return self.low | self.high | self.dual

    @classmethod
    def unclipped(cls, loss: Tensor, ratio: Tensor, **metrics: Tensor) -> "PolicyTerm":
        """Return the term of a loss without bounds. All tensors are [N]."""
        none = torch.zeros_like(loss, dtype=torch.bool)
        ratio = ratio.detach()
        return cls(
            loss=loss, ratio=ratio, low=none, high=none, dual=none, stopped=none, metrics=metrics
        )


PolicyLoss = Callable[[PolicyInputs, PolicyOptimization], PolicyTerm]


def ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return p / p_old per token [N], with log p - log p_old held within LOG_RATIO_LIMIT (no
    gradient outside of it).
    """
    difference = logprobs - old_logprobs.detach()
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

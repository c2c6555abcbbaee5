"""Other loss terms per target token, [N]."""

from torch import Tensor


def entropy_bonus(entropies: Tensor, coefficient: float) -> Tensor:
    """What is added to the loss to reward entropy: -coefficient * entropy. entropies: [N], nats."""
    return -coefficient * entropies


def negative_log_likelihood(logprobs: Tensor) -> Tensor:
    """The supervised loss per token. logprobs: [N]."""
    return -logprobs

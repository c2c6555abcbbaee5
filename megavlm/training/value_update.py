"""Losses of a critic over one pack, and their measures."""

from torch import Tensor

from megavlm.algorithms.value_loss import value_loss
from megavlm.config.algorithm import PPO
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.forward_backward import LossFunction
from megavlm.training.losses import Measures


def critic_loss(settings: PPO) -> LossFunction:
    """Return the loss function of a separate critic."""

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        return weighted_value_loss(settings, pack, scores)

    return loss_function


def with_value_loss(settings: PPO, policy: LossFunction, *, critic_alone: bool) -> LossFunction:
    """Return the loss function of a policy with a shared critic. `critic_alone`: the policy's loss
    is computed, and its gradient is exactly zero.
    """

    def loss_function(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        policy_part, measures = policy(pack, scores)
        value_part, value_measures = weighted_value_loss(settings, pack, scores)
        policy_share = 0.0 if critic_alone else 1.0
        total = policy_share * policy_part + settings.value_coefficient * value_part
        signal = policy_share * measures["signal"] + value_measures["signal"]
        return total, measures | value_measures | {"loss": total.detach(), "signal": signal}

    return loss_function


def weighted_value_loss(settings: PPO, pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
    """Return the value loss of a pack with the policy's loss weights, and its measures. `signal`
    counts the tokens with a gradient.
    """
    columns = pack.columns
    assert columns is not None and columns.values is not None and columns.returns is not None
    loss, clipped = value_loss(scores.values, columns.values, columns.returns, settings.value_clip)
    total = (loss * columns.loss_weights).sum()
    counted = columns.loss_weights > 0
    returns = columns.returns[counted]
    errors = returns - columns.values[counted]
    return total, {
        "signal": (counted & ~clipped).float().sum(),
        "value_tokens": counted.float().sum(),
        "value_loss": total.detach(),
        "value_clipped": (clipped & counted).float().sum(),
        "values": columns.values[counted].sum(),
        "returns": returns.sum(),
        "returns_squared": returns.square().sum(),
        "errors": errors.sum(),
        "errors_squared": errors.square().sum(),
    }

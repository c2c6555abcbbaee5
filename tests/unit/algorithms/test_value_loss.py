"""The critic's loss and explained variance."""

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.algorithms.value_loss import explained_variance, value_loss
from megavlm.config.algorithm import PPO
from megavlm.training.losses import weighted_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, False),
        (1.5, 1.0, 3.0, 1.62, True),  # towards the target, further than the bound: 1.2 counts
        (0.5, 1.0, 3.0, 3.125, False),  # away from it: what it is counts
        (0.5, 1.0, -3.0, 7.22, True),
    ],
)
def test_the_larger_of_free_and_bounded(
    value: float, old: float, target: float, loss: float, clipped: bool
) -> None:
    values = torch.tensor([value], requires_grad=True)
    made, active = value_loss(values, torch.tensor([old]), torch.tensor([target]), 0.2)
    assert made.item() == pytest.approx(loss) and active.item() is clipped
    made.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(0.0 if clipped else value - target)
    free, active = value_loss(values, torch.tensor([old]), torch.tensor([target]), None)
    assert free.item() == pytest.approx((value - target) ** 2 / 2) and not active


def test_explained_variance_is_one_less_the_rest() -> None:
    returns, values = [1.0, 0.0, 0.5, 2.0], [0.8, 0.1, 0.5, 1.0]
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    made = explained_variance(
        4, sum(returns), sum(r * r for r in returns), sum(errors), sum(e * e for e in errors)
    )
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    assert made == pytest.approx(expected)
    assert math.isnan(explained_variance(2, 2.0, 2.0, 0.0, 0.0))


def test_equal_returns_have_no_variance_to_explain() -> None:
    """Whatever their number and size: sums in float32 would leave some."""
    columns = SimpleNamespace(
        values=torch.linspace(0, 1, 5000),
        returns=torch.full((5000,), 0.9),
        loss_weights=torch.ones(5000),
    )
    pack: Any = SimpleNamespace(columns=columns)
    scores: Any = SimpleNamespace(values=columns.values)
    _, sums = weighted_value_loss(PPO(), pack, scores)
    names = ("value_tokens", "returns", "returns_squared", "errors", "errors_squared")
    assert math.isnan(explained_variance(*(float(sums[name]) for name in names)))

"""When a critic's update has something to learn, and what is told where it has not."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.config.algorithm import PPO
from megavlm.training.losses import critic_loss, with_value_loss
from megavlm.training.metrics import value_metrics
from tests.support.columns import columns


def pack(weights: list[float]) -> Any:
    count = len(weights)
    given = columns(
        count,
        loss_weights=torch.tensor(weights),
        values=torch.zeros(count),
        returns=torch.arange(1.0, count + 1),
    )
    return SimpleNamespace(columns=given)


def scores(*values: float) -> Any:
    return SimpleNamespace(values=torch.tensor(values, requires_grad=True))


@pytest.mark.parametrize(
    ("weights", "values", "signal"),
    [
        ([0.5, 0.5], (0.0, 0.0), 2),
        ([0.0, 0.5], (0.0, 0.0), 1),
        ([0.0, 0.0], (0.0, 0.0), 0),
        ([0.5, 0.5], (0.9, 0.0), 1),  # held back by the clip: the first has no gradient
    ],
)
def test_the_signal_is_tokens_with_a_gradient(
    weights: list[float], values: tuple[float, ...], signal: int
) -> None:
    given = scores(*values)
    loss, measures = critic_loss(PPO(value_clip=0.2))(pack(weights), given)
    loss.backward()
    assert measures["signal"] == signal == given.values.grad.count_nonzero()


@pytest.mark.parametrize(
    ("weight", "alone", "signal"),
    [(0.0, False, 3), (0.0, True, 0), (1.0, True, 2), (1.0, False, 5)],
)
def test_a_shared_critic_adds_to_the_policy_s_signal(
    weight: float, alone: bool, signal: int
) -> None:
    def policy(pack: Any, scores: Any) -> Any:
        return scores.values.sum(), {"signal": torch.tensor(3.0), "tokens": torch.tensor(2.0)}

    loss = with_value_loss(PPO(critic="shared"), policy, critic_alone=alone)
    _, measures = loss(pack([weight, weight]), scores(0.0, 0.0))
    assert measures["signal"] == signal


def test_metrics_where_no_token_counts() -> None:
    """As where all responses are truncated and masked, or all rewards fail and are skipped."""
    _, measures = critic_loss(PPO())(pack([0.0, 0.0]), scores(0.0, 0.0))
    metrics = value_metrics([{name: float(value) for name, value in measures.items()}])
    assert math.isnan(metrics.pop("explained_variance")) and not any(metrics.values())

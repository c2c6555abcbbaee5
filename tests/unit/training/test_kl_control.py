"""The KL coefficient: it adapts from step to step where a recipe says so, and is a run's state."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.config.algorithm import GRPO, PPO
from megavlm.training.policy_trainer import PolicyTrainer, start_kl


def steps(settings: GRPO, measured: list[float]) -> list[float]:
    """The coefficient of each step, and the next one."""
    trainer: Any = SimpleNamespace(
        settings=settings, state={"kl_coefficient": settings.kl_coefficient}
    )
    used = []
    for kl in measured:
        metrics = {"kl_reference": kl}
        PolicyTrainer.adapt_kl(trainer, metrics)
        used.append(metrics.get("kl_coefficient", settings.kl_coefficient))
    return [*used, trainer.state["kl_coefficient"]]


def test_it_follows_the_target() -> None:
    settings = GRPO(kl_coefficient=0.1, kl_target=0.05, kl_horizon=1280)  # ten steps of 128
    assert steps(settings, [0.5, 0.5, 0.0]) == pytest.approx(
        [0.1, 0.1 * 1.02, 0.1 * 1.02**2, 0.1 * 1.02**2 * 0.98]
    )


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_changes_nothing(measured: float) -> None:
    settings = GRPO(kl_coefficient=0.1, kl_target=0.05, kl_horizon=1280)
    assert steps(settings, [measured, 0.5]) == pytest.approx([0.1, 0.1, 0.1 * 1.02])


def test_without_a_target_it_stays() -> None:
    assert steps(GRPO(kl_coefficient=0.1), [0.5, 0.0]) == [0.1] * 3


@pytest.mark.parametrize(
    ("changed", "coefficient"),
    [({}, 0.13), ({"kl_coefficient": 0.2}, 0.2), ({"kl_target": None}, 0.1), ({"lam": 0.9}, 0.13)],
)
def test_a_resume_goes_on_with_the_adapted_one_unless_the_recipe_has_another(
    changed: dict[str, Any], coefficient: float
) -> None:
    state: dict[str, float] = {}
    settings = {"kl_coefficient": 0.1, "kl_target": 0.05}
    start_kl(PPO(**settings), state)
    state["kl_coefficient"] = 0.13
    start_kl(PPO(**settings | changed), state)
    assert state["kl_coefficient"] == coefficient

"""The loss of a pack: one denominator for all packs, and what is measured."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.schema import GRPO
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.policy_loss import policy_loss, supervised_loss

N = 12


class Targets:
    """What a loss reads of a pack."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.num_targets = len(next(iter(values.values())))


def columns(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("logprobs", "entropy", "advantages", "rollout", "old", "reference")
    drawn = {name: torch.randn(N, generator=generator) * 0.3 for name in names}
    return drawn | {"logprobs": drawn["logprobs"] - 2, "old": drawn["old"] - 2}


def run(part: slice, settings: GRPO, *, first_update: bool = False) -> tuple[Tensor, Any, Tensor]:
    """Loss, measures and the gradient of log-probs over some of the targets."""
    c = {name: value[part] for name, value in columns().items()}
    values = {
        "advantages": c["advantages"],
        "rollout_logprobs": c["old"] + c["rollout"],
        "reference_logprobs": c["old"] + c["reference"],
    }
    if not first_update:
        values["old_logprobs"] = c["old"]
    logprobs = c["logprobs"].clone().requires_grad_()
    scores = TokenScores(logprobs, c["entropy"], torch.empty(0))
    pack: Any = Targets(values)
    loss, measures = policy_loss(settings, N)(pack, scores)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), measures, logprobs.grad


SETTINGS = [
    GRPO(),
    GRPO(kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01),
    GRPO(kl_coefficient=0, importance_cap=1.0),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("first_update", [False, True])
def test_cutting_into_packs_changes_nothing(settings: GRPO, first_update: bool) -> None:
    whole, measures, gradient = run(slice(None), settings, first_update=first_update)
    # one of them without targets, as a context rank's part or a pack of padding has
    slices = (slice(0, 5), slice(5, 5), slice(5, N))
    parts = [run(part, settings, first_update=first_update) for part in slices]
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in parts]), gradient)
    for name, value in measures.items():
        both = torch.stack([part[1][name] for part in parts])
        combined = both.max() if name.startswith("largest") else both.sum()
        torch.testing.assert_close(combined, value, msg=name)


def test_against_the_formula() -> None:
    settings = GRPO(kl_coefficient=0.1, clip_low=0.2, clip_high=0.3, importance_cap=1.2)
    loss, _, _ = run(slice(None), settings)
    c = columns()
    expected = 0.0
    for logp, old, advantage, rollout, reference in zip(
        *(c[k].double() for k in ("logprobs", "old", "advantages", "rollout", "reference")),
        strict=True,
    ):
        ratio = (logp - old).exp()
        policy = -min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        weight = min((-rollout).exp(), torch.tensor(1.2, dtype=torch.double))
        gap = old + reference - logp
        expected += float(weight * policy + 0.1 * (gap.exp() - 1 - gap)) / N
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_first_update_is_never_clipped_and_has_the_plain_policy_gradient() -> None:
    settings = GRPO(kl_coefficient=0, importance_cap=1e6)
    _, measures, gradient = run(slice(None), settings, first_update=True)
    c = columns()
    weight = (c["logprobs"] - c["old"] - c["rollout"]).exp()
    assert measures["clipped"] == 0
    torch.testing.assert_close(gradient, -weight * c["advantages"] / N)


def test_supervised_loss_is_the_mean_over_all_answers() -> None:
    logprobs = columns()["logprobs"]
    pack: Any = Targets({"any": logprobs})
    loss, measures = supervised_loss(2 * N)(pack, TokenScores(logprobs, logprobs, torch.empty(0)))
    assert loss.item() == pytest.approx(-logprobs.sum().item() / (2 * N))
    assert measures["tokens"] == N

"""The loss terms per token: values, gradients, and where the clip is active."""

import pytest
import torch

from megavlm.algorithms.losses import clipped_policy_loss, entropy_bonus, negative_log_likelihood


def loss_and_gradient(ratio: float, advantage: float) -> tuple[float, float, bool]:
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss, clipped = clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    loss.sum().backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item(), bool(clipped.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),
        (1.5, 2.0, -2.6, True),  # rose beyond 1 + clip_high: no further reward
        (0.5, 2.0, -1.0, False),  # fell, though it was good: pulled back
        (0.5, -2.0, 1.6, True),  # fell below 1 - clip_low: no further push
        (1.5, -2.0, 3.0, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_surrogate_and_its_gradient(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    actual_loss, gradient, actual_clipped = loss_and_gradient(ratio, advantage)
    assert actual_loss == pytest.approx(loss)
    assert actual_clipped is clipped
    # d(ratio)/d(log p) = ratio
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_only_the_current_policy_gets_a_gradient() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    old = torch.tensor([-1.1], requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, old, torch.ones(1), 0.2, 0.2)
    loss.sum().backward()
    assert old.grad is None and logprobs.grad is not None


def test_the_first_update_has_the_gradient_of_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.0])
    clipped_policy_loss(logprobs, logprobs, advantages, 0.2, 0.2)[0].sum().backward()
    assert logprobs.grad is not None and torch.equal(logprobs.grad, -advantages)


def test_extreme_differences_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -300.0], requires_grad=True)
    loss, _ = clipped_policy_loss(
        logprobs, torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_entropy_lowers_the_loss_and_likelihood_is_negated() -> None:
    assert entropy_bonus(torch.tensor([2.0, 0.0]), 0.5).tolist() == [-1.0, 0.0]
    assert negative_log_likelihood(torch.tensor([-3.0])).tolist() == [3.0]

"""The KL estimators against the exact divergence of two categorical distributions."""

import pytest
import torch

from megavlm.algorithms import kl


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    return policy, reference


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_divergence(name: str) -> None:
    policy, reference = distributions()
    exact = (policy.exp() * (policy - reference)).sum()
    expectation = (policy.exp() * kl.estimator(name)(policy, reference, policy)).sum()
    torch.testing.assert_close(expectation, exact)


def test_k2_has_the_gradient_of_the_divergence() -> None:
    # d/dtheta KL = E[(log p - log q) dlog p]. The samples are fixed: the weights are detached.
    logits = torch.randn(
        7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    _, reference = distributions()
    policy = logits.log_softmax(0)
    exact = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )[0]
    estimate = torch.autograd.grad(
        (policy.exp().detach() * kl.k2(policy, reference)).sum(), logits
    )[0]
    torch.testing.assert_close(estimate, exact)


def test_unbiased_has_value_and_gradient_of_the_divergence_on_another_policy_s_samples() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    _, reference = distributions()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (old.exp() * kl.unbiased(policy, reference, old)).sum()
    torch.testing.assert_close(estimate, exact)
    theirs, ours = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, estimate))
    torch.testing.assert_close(ours, theirs)
    biased = torch.autograd.grad((old.exp() * kl.k3(policy, reference)).sum(), logits)[0]
    assert (biased - theirs).abs().max() > 0.01


def test_the_adaptive_coefficient_follows_the_divergence() -> None:
    def after(measured: float) -> float:
        return kl.adapted(0.1, measured, target=0.05, horizon=1000, samples=100)

    assert after(0.05) == 0.1
    assert after(0.055) == pytest.approx(0.1 * 1.01)
    assert after(9.0) == pytest.approx(0.1 * 1.02), "by at most a fifth over the horizon"
    assert after(0.0) == pytest.approx(0.1 * 0.98)


def test_k2_and_k3_are_never_negative_and_zero_for_equal_policies() -> None:
    policy, reference = distributions()
    for estimate in (kl.k2, kl.k3):
        assert (estimate(policy, reference) >= 0).all()
        assert torch.equal(estimate(policy, policy), torch.zeros_like(policy))


def test_k3_keeps_small_differences_in_float32() -> None:
    difference = torch.tensor([1e-4])
    torch.testing.assert_close(
        kl.k3(torch.zeros(1), difference), difference**2 / 2, rtol=0.05, atol=0.0
    )


def test_k3_stays_finite_for_tokens_that_the_policy_gave_up() -> None:
    logprobs = torch.tensor([-200.0], requires_grad=True)
    estimate = kl.k3(logprobs, torch.zeros(1))
    estimate.sum().backward()
    assert (
        estimate.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    )

"""Truncated importance weights and the mismatch of the two engines."""

import torch

from megavlm.algorithms.importance import mismatch, truncated_weights


def test_weights_are_the_capped_ratio_without_gradient() -> None:
    old = torch.tensor([0.5, 0.2, 0.4]).log().requires_grad_()
    weights = truncated_weights(old, torch.tensor([0.5, 0.4, 0.1]).log(), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 2.0]))
    assert not weights.requires_grad


def test_a_weight_that_would_overflow_is_the_cap() -> None:
    assert truncated_weights(torch.tensor([0.0]), torch.tensor([-1000.0]), cap=2.0).tolist() == [
        2.0
    ]


def test_mismatch_estimates_the_divergence_of_rollout_from_trainer() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = (
        torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    estimate, largest = mismatch(trainer, rollout)
    exact = (rollout.exp() * (rollout - trainer)).sum()
    torch.testing.assert_close((rollout.exp() * estimate).sum(), exact)
    assert largest == (rollout - trainer).abs().max()


def test_mismatch_of_no_tokens_is_zero() -> None:
    estimate, largest = mismatch(torch.empty(0), torch.empty(0))
    assert estimate.shape == (0,) and largest.item() == 0.0

"""Importance weights between rollout engine and trainer, and how far the two are apart."""

import math

import pytest
import torch

from megavlm.algorithms import importance
from tests.unit.algorithms.literal import ROW, row

IDS = torch.tensor(ROW.ids)
ROLLOUT = row(ROW.draw(5)) - 2
OLD = ROLLOUT + row(ROW.draw(6, 0.3))


def test_token_ratios_are_without_gradient() -> None:
    old = torch.tensor([0.5, 0.2, 0.4]).log().requires_grad_()
    ratios = importance.token_ratios(old, torch.tensor([0.5, 0.4, 0.1]).log())
    torch.testing.assert_close(ratios, torch.tensor([1.0, 0.5, 4.0]))
    assert not ratios.requires_grad


def test_truncated_and_masked() -> None:
    ratios = torch.tensor([0.1, 0.5, 1.0, 2.0, 2.5])
    torch.testing.assert_close(
        importance.truncated(ratios, 2.0), torch.tensor([0.1, 0.5, 1.0, 2.0, 2.0])
    )
    assert importance.masked(ratios, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


def test_a_sequence_s_ratio_is_the_product_over_its_tokens() -> None:
    ratios = importance.sequence_ratios(OLD, ROLLOUT, IDS, ROW.num)
    for places in ROW.sequences():
        product = math.prod((OLD[p] - ROLLOUT[p]).exp().item() for p in places)
        assert all(ratios[p].item() == pytest.approx(product) for p in places)


def test_rejection_is_by_the_mean_ratio_per_token() -> None:
    below, above = 0.8, 1.25
    out = importance.rejected(OLD, ROLLOUT, IDS, ROW.num, below=below, above=above)
    seen = set()
    for places in ROW.sequences():
        if places:
            mean = math.exp(sum((OLD[p] - ROLLOUT[p]).item() for p in places) / len(places))
            expected = not below <= mean <= above
            seen.add(expected)
            assert all(out[p].item() is expected for p in places)
    assert seen == {True, False}
    assert not importance.rejected(OLD, ROLLOUT, IDS, ROW.num, below=None, above=None).any()


def test_a_weight_that_would_overflow_is_the_cap() -> None:
    ratios = importance.token_ratios(torch.tensor([0.0]), torch.tensor([-1000.0]))
    assert importance.truncated(ratios, 2.0).tolist() == [2.0]


def test_mismatch_estimates_the_divergence_of_rollout_from_trainer() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = (
        torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    estimate, largest = importance.mismatch(trainer, rollout)
    exact = (rollout.exp() * (rollout - trainer)).sum()
    torch.testing.assert_close((rollout.exp() * estimate).sum(), exact)
    assert largest == (rollout - trainer).abs().max()


def test_mismatch_of_no_tokens_is_zero() -> None:
    estimate, largest = importance.mismatch(torch.empty(0), torch.empty(0))
    assert estimate.shape == (0,) and largest.item() == 0.0

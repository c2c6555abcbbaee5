"""The policy losses per token: values, gradients, and where a bound is active."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megavlm.algorithms.policy_loss import PolicyInputs, PolicyTerm
from megavlm.algorithms.registry import POLICY_LOSSES, load_policy_loss
from megavlm.config.algorithm import GRPO
from tests.unit.algorithms.literal import ROW, row

SETTINGS = GRPO(clip_low=0.2, clip_high=0.3)


def term_of(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    ids: Tensor | None = None,
    dual_clip: float | None = None,
    **settings: float,
) -> PolicyTerm:
    """Compute a policy loss; without ids all tokens are of one sequence."""
    ids = torch.zeros(len(logprobs), dtype=torch.int64) if ids is None else ids
    inputs = PolicyInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        sequence_ids=ids,
        num_sequences=len(ids),
    )
    chosen = replace(SETTINGS, policy_loss=name, dual_clip=dual_clip, **settings)
    return load_policy_loss(chosen)(inputs, chosen)


def gradient(term: PolicyTerm, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(term.loss.sum(), logprobs)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "bound"),
    [
        (1.0, 2.0, -2.0, None),
        (1.25, 2.0, -2.5, None),
        (1.5, 2.0, -2.6, "high"),  # rose beyond 1 + clip_high: no further reward
        (0.5, 2.0, -1.0, None),  # fell, though it was good: pulled back
        (0.5, -2.0, 1.6, "low"),  # fell below 1 - clip_low: no further push
        (1.5, -2.0, 3.0, None),
        (4.0, -2.0, 6.0, "dual"),  # a bad token that became likely: bounded by c = 3
        (4.0, 2.0, -2.6, "high"),
        (1.5, 0.0, 0.0, None),
    ],
)
def test_the_clipped_surrogate(
    ratio: float, advantage: float, loss: float, bound: str | None
) -> None:
    old = row([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    term = term_of("clip", logprobs, old, row([advantage]), dual_clip=3.0)
    assert term.loss.item() == pytest.approx(loss)
    assert [name for name in ("low", "high", "dual") if getattr(term, name)] == (
        [bound] if bound else []
    )
    assert term.clipped.item() is (bound is not None)
    # d(ratio)/d(log p) = ratio
    expected = 0.0 if bound else -advantage * ratio
    assert gradient(term, logprobs).item() == pytest.approx(expected)


def test_without_a_dual_clip_a_bad_token_s_loss_has_no_bound() -> None:
    logprobs = row([-1.0 + math.log(4.0)])
    term = term_of("clip", logprobs, row([-1.0]), row([-2.0]))
    assert term.loss.item() == pytest.approx(8.0) and not term.clipped


@pytest.mark.parametrize("dual_clip", [None, 1.35])
def test_gspo_equals_loops_and_its_gradient_is_that_of_the_sequence_ratio(
    dual_clip: float | None,
) -> None:
    ids = torch.tensor(ROW.ids)
    old = row(ROW.draw(4)) - 2
    logprobs = (old + row(ROW.draw(3, 0.5))).requires_grad_()
    of_sequence = [1.0, -1.5, 0.7, 9.0, -0.4]
    advantages = row([of_sequence[i] for i in ROW.ids])
    term = term_of("gspo", logprobs, old, advantages, ids, dual_clip)
    lengths = torch.tensor([float(ROW.ids.count(i)) for i in ROW.ids])
    ours = torch.autograd.grad((term.loss / lengths).sum(), logprobs)[0]

    total = row([0.0]).sum()
    bounded = 0
    for advantage, places in zip(of_sequence, ROW.sequences(), strict=True):
        if not places:
            continue
        ratio = sum((logprobs[p] - old[p] for p in places), row([0.0])[0]).div(len(places)).exp()
        free, held = ratio * advantage, ratio.clamp(0.8, 1.3) * advantage
        loss = -torch.minimum(free, held)
        if dual_clip is not None and advantage < 0:
            loss = torch.minimum(loss, row([-dual_clip * advantage])[0])
        total = total + loss
        bounded += len(places) * bool(loss.item() != -free.item())
        for place in places:
            assert term.loss[place].item() == pytest.approx(loss.item())
            assert term.ratio[place].item() == pytest.approx(ratio.item())
    theirs = torch.autograd.grad(total, logprobs)[0]
    torch.testing.assert_close(ours, theirs)
    assert 0 < term.clipped.sum() == bounded < len(ROW.ids), "some are bounded, some are not"


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (1.5, 2.0, 1.3), (1.5, -2.0, 1.3), (0.5, 2.0, 0.8), (0.9, -1.0, 0.9)],
)
def test_cispo_keeps_every_gradient_with_a_bounded_weight(
    ratio: float, advantage: float, weight: float
) -> None:
    old = row([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    term = term_of("cispo", logprobs, old, row([advantage]))
    assert term.loss.item() == pytest.approx(-weight * advantage * logprobs.item())
    assert gradient(term, logprobs).item() == pytest.approx(-weight * advantage)
    assert (term.low.item(), term.high.item()) == (ratio < 0.8, ratio > 1.3)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -1.0)])
def test_sapo_is_the_formula_of_the_paper(ratio: float, advantage: float) -> None:
    old = row([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    term = term_of("sapo", logprobs, old, row([advantage]), tau_pos=0.7, tau_neg=1.4)
    tau = 0.7 if advantage > 0 else 1.4
    sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert term.loss.item() == pytest.approx(-4 / tau * sigmoid * advantage)
    # Equation 6: the weight of a token's gradient is 4 p (1 - p) times its ratio.
    weight = 4 * sigmoid * (1 - sigmoid) * ratio
    assert gradient(term, logprobs).item() == pytest.approx(-weight * advantage)
    assert not term.clipped.any()


def test_only_the_current_policy_gets_a_gradient() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    old = torch.tensor([-1.1], requires_grad=True)
    for name in POLICY_LOSSES:
        term_of(name, logprobs, old, torch.ones(1)).loss.sum().backward()
        assert old.grad is None and logprobs.grad is not None


def test_the_first_update_has_the_gradient_of_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages, ids = torch.tensor([1.0, -0.5, 0.0]), torch.tensor([0, 0, 1])
    for name in POLICY_LOSSES:
        term = term_of(name, logprobs, logprobs, advantages, ids)
        assert torch.equal(gradient(term, logprobs), -advantages)


def test_extreme_differences_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -300.0], requires_grad=True)
    old, advantages = torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0])
    ids = torch.tensor([0, 1])
    for name in POLICY_LOSSES:
        term = term_of(name, logprobs, old, advantages, ids)
        assert term.loss.isfinite().all() and gradient(term, logprobs).isfinite().all()

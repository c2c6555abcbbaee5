"""The loss of a pack: its denominators are in the weights, what is measured, and which updates have
a signal.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.config.algorithm import GRPO
from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.losses import Update, policy_loss, supervised_loss
from tests.support.columns import columns as target_columns

N = 12


class Targets:
    """What a loss reads of a pack."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.num_targets = len(next(iter(values.values())))
        self.columns = target_columns(self.num_targets, **values)
        self.num_sequences = 3


def columns(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("logprobs", "entropy", "advantages", "rollout", "old", "reference")
    drawn = {name: torch.randn(N, generator=generator) * 0.3 for name in names}
    return drawn | {
        "logprobs": drawn["logprobs"] - 2,
        "old": drawn["old"] - 2,
        "sequence_ids": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]),
    }


def run(
    part: slice, settings: GRPO, *, first_update: bool = False, **values: Any
) -> tuple[Tensor, Any, Tensor]:
    """Loss, measures and the gradient of log-probs over some of the targets."""
    c = {name: value[part] for name, value in columns().items()}
    given = {
        "loss_weights": torch.full_like(c["old"], 1 / N),
        "sequence_ids": c["sequence_ids"],
        "advantages": c["advantages"],
        "rollout_logprobs": c["old"] + c["rollout"],
        "reference_logprobs": c["old"] + c["reference"],
    }
    if not first_update:
        given["old_logprobs"] = c["old"]
    given |= {name: value[part] for name, value in values.items() if isinstance(value, Tensor)}
    logprobs = c["logprobs"].clone().requires_grad_()
    scores = TokenScores(logprobs, c["entropy"], torch.empty(0))
    pack: Any = Targets(given)
    options = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    update = Update(kl_coefficient=settings.kl_coefficient, is_first=first_update, **options)
    loss, measures = policy_loss(settings, update)(pack, scores)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), measures, logprobs.grad


SETTINGS = [
    GRPO(),
    GRPO(kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01),
    GRPO(kl_coefficient=0, importance_cap=1.0, dual_clip=1.3),
    GRPO(policy_loss="cispo", kl_estimator="unbiased"),
    GRPO(policy_loss="gspo", loss_aggregation="sequence_mean"),
    GRPO(policy_loss="sapo", tau_neg=1.5),
    GRPO(importance="sequence", importance_cap=1.1, importance_floor=0.5),
    GRPO(importance="none", reject_below=0.9, reject_above=1.1),
    GRPO(old_logprobs="rollout", importance="none"),
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
    settings = GRPO(
        kl_coefficient=0.1,
        clip_low=0.2,
        clip_high=0.3,
        importance_cap=1.2,
        entropy_coefficient=0.05,
    )
    loss, _, _ = run(slice(None), settings)
    c = columns()
    expected = 0.0
    names = ("logprobs", "old", "advantages", "rollout", "reference", "entropy")
    for logp, old, advantage, rollout, reference, entropy in zip(
        *(c[name].double() for name in names), strict=True
    ):
        ratio = (logp - old).exp()
        policy = -min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        weight = min((-rollout).exp(), torch.tensor(1.2, dtype=torch.double))
        gap = old + reference - logp
        expected += float(weight * policy + 0.1 * (gap.exp() - 1 - gap) - 0.05 * entropy) / N
    assert loss.item() == pytest.approx(expected, rel=1e-5)


OWN = "tests.unit.algorithms.own"


def test_a_user_s_loss_is_as_good_as_a_built_in_one() -> None:
    settings = GRPO(dual_clip=1.3, kl_coefficient=0.1)
    loss, measures, gradient = run(slice(None), settings)
    own = run(slice(None), replace(settings, policy_loss=f"{OWN}:clip"))
    assert torch.equal(own[0], loss) and torch.equal(own[2], gradient)
    assert own[1] == measures


def test_a_user_s_loss_reports_metrics_and_may_have_no_bounds() -> None:
    settings = GRPO(kl_coefficient=0, policy_loss=f"{OWN}:plain")
    _, measures, _ = run(slice(None), settings)
    c = columns()
    squares = (c["logprobs"] - c["old"]).exp().square()
    torch.testing.assert_close(measures["policy_loss/squared_ratio"], squares.sum())
    assert measures["clipped"] == 0 and measures["signal"] == N


def test_a_user_s_loss_returns_one_number_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"own:total returned losses of shape \[\] for \[12\] tok"):
        run(slice(None), GRPO(policy_loss=f"{OWN}:total"))


def test_the_first_update_is_never_clipped_and_has_the_plain_policy_gradient() -> None:
    settings = GRPO(kl_coefficient=0, importance_cap=1e6)
    _, measures, gradient = run(slice(None), settings, first_update=True)
    c = columns()
    weight = (c["logprobs"] - c["old"] - c["rollout"]).exp()
    assert measures["clipped"] == 0
    torch.testing.assert_close(gradient, -weight * c["advantages"] / N)


def test_the_first_update_leaves_its_log_probs_for_later_ones() -> None:
    c = columns()
    values = {
        "loss_weights": torch.ones(N),
        "sequence_ids": c["sequence_ids"],
        "advantages": c["advantages"],
        "rollout_logprobs": c["old"],
    }
    pack: Any = Targets(values)
    loss = policy_loss(GRPO(kl_coefficient=0), Update(kl_coefficient=0))
    loss(pack, TokenScores(c["logprobs"], c["entropy"], torch.empty(0)))
    assert torch.equal(pack.columns.old_logprobs, c["logprobs"])
    loss(pack, TokenScores(c["logprobs"] + 1, c["entropy"], torch.empty(0)))
    assert torch.equal(pack.columns.old_logprobs, c["logprobs"])


@pytest.mark.parametrize("old", ["trainer", "rollout"])
def test_while_the_policy_is_the_reference_no_pass_of_it_is_needed(old: Any) -> None:
    """Bit for bit as with the log-probs of such a pass, also in the pack's later updates."""
    c = columns()
    settings = GRPO(kl_coefficient=0.1, old_logprobs=old, importance="none")
    update = Update(kl_coefficient=0.1, has_moved=False)
    with_pass, without = (
        Targets(
            {
                "loss_weights": torch.ones(N),
                "sequence_ids": c["sequence_ids"],
                "advantages": c["advantages"],
                "rollout_logprobs": c["old"] + c["rollout"],
                **reference,
            }
        )
        for reference in ({"reference_logprobs": c["logprobs"].clone()}, {})
    )
    for shift in (0.0, 0.1):
        results = []
        for pack, is_reference in ((with_pass, False), (without, True)):
            logprobs = (c["logprobs"] + shift).requires_grad_()
            given: Any = pack
            scores = TokenScores(logprobs, c["entropy"], torch.empty(0))
            loss = policy_loss(settings, replace(update, is_reference=is_reference))
            total, measures = loss(given, scores)
            total.backward()
            results.append((total, logprobs.grad, measures["kl_reference"]))
        for expected, found in zip(*results, strict=True):
            assert expected is not None and torch.equal(expected, found)
        assert (results[0][2] == 0) == (shift == 0)


@pytest.mark.parametrize("first_update", [False, True])
def test_the_gap_between_the_engines_is_measured_where_it_can_be(first_update: bool) -> None:
    c = columns()
    settings = GRPO(old_logprobs="rollout", importance="none", kl_coefficient=0)
    _, measures, _ = run(slice(None), settings, first_update=first_update)
    gap = c["logprobs"] - c["old"] - c["rollout"]
    if first_update:
        assert measures["engine_tokens"] == N
        assert measures["largest_rollout_difference"] == gap.abs().max()
        torch.testing.assert_close(measures["rollout_train_kl"], (gap.exp() - 1 - gap).sum())
    else:  # the present policy is not the one that sampled, and there is no pass that tells
        assert measures["engine_tokens"] == 0 == measures["rollout_train_kl"]
    _, measures, _ = run(slice(None), GRPO(), first_update=first_update)
    assert measures["engine_tokens"] == N


ZERO = torch.zeros(N)


@pytest.mark.parametrize(
    ("settings", "values", "signal"),
    [
        (GRPO(kl_coefficient=0), {}, True),
        (GRPO(kl_coefficient=0), {"advantages": ZERO}, False),
        (GRPO(kl_coefficient=0), {"loss_weights": ZERO}, False),
        # The policy is the reference: its KL is rounding. Once it has moved it is not.
        (GRPO(), {"advantages": ZERO, "has_moved": False}, False),
        (GRPO(), {"advantages": ZERO, "has_moved": True}, True),
        (GRPO(kl_in="reward", kl_estimator="k1"), {"advantages": ZERO}, False),
        (GRPO(kl_coefficient=0, entropy_coefficient=1e-3), {"advantages": ZERO}, True),
        (GRPO(kl_coefficient=0, reject_above=1 + 1e-9), {"rollout_logprobs": ZERO - 99}, False),
        (GRPO(kl_coefficient=0, clip_high=1e-9, clip_low=1e-9), {"advantages": ZERO + 1}, True),
        (  # every ratio is above the bound, and good: nothing has a gradient
            GRPO(kl_coefficient=0),
            {"advantages": ZERO + 1, "old_logprobs": ZERO - 99},
            False,
        ),
        (
            GRPO(kl_coefficient=0, policy_loss="cispo"),
            {"advantages": ZERO + 1, "old_logprobs": ZERO - 99},
            True,
        ),
    ],
)
def test_an_update_has_a_signal_or_has_none(
    settings: GRPO, values: dict[str, Any], signal: bool
) -> None:
    _, measures, gradient = run(slice(None), settings, **values)
    assert (measures["signal"] > 0) == signal
    if not signal and values.get("has_moved") is not False:
        assert not gradient.any()


def test_supervised_loss_is_the_mean_over_all_answers() -> None:
    logprobs = columns()["logprobs"]
    pack: Any = Targets({"rollout_logprobs": logprobs})
    loss, measures = supervised_loss(2 * N)(pack, TokenScores(logprobs, logprobs, torch.empty(0)))
    assert loss.item() == pytest.approx(-logprobs.sum().item() / (2 * N))
    assert measures["tokens"] == N


@pytest.mark.parametrize("estimator", ["k2", "unbiased"])
def test_a_teacher_pulls_each_token_by_the_difference_of_log_probs(estimator: Any) -> None:
    """Without rewards, and by the weight of the token's teacher. A token without a teacher, or one
    that it gave no log-prob of, is not pulled.
    """
    teacher = columns()["old"] + columns()["reference"]
    teacher[3] = torch.nan
    ids = torch.arange(N) % 2
    teacher[4], ids[4] = torch.nan, -1
    teachers = {
        "first": TeacherConfig(urls=("http://a",), rows=("a",)),
        "second": TeacherConfig(urls=("http://b",), weight=3.0),
    }
    settings = GRPO(kl_coefficient=0, importance="none")
    loss, measures, gradient = run(
        slice(None),
        settings,
        first_update=True,
        advantages=ZERO,
        teacher_logprobs=teacher,
        teacher_ids=ids,
        distillation=Distillation(teachers=teachers, coefficient=0.5, kl_estimator=estimator),
    )
    scale = torch.where(ids == 1, 1.5, 0.5)
    expected = scale * (columns()["logprobs"] - teacher) / N
    expected[3:5] = 0
    torch.testing.assert_close(gradient, expected)
    first, second = (measures[f"kl_teacher/{name}"] for name in teachers)
    assert loss > 0 and loss == pytest.approx((0.5 * first + 1.5 * second) / N)
    assert measures["kl_teacher"] == pytest.approx(first + second)
    scored = [measures[f"teacher_tokens/{name}"] for name in teachers]
    assert scored == [((ids == number) & ~teacher.isnan()).sum() for number in (0, 1)]
    assert measures["signal"] == N - 2


def test_the_forward_divergence_from_a_teacher_is_part_of_the_loss() -> None:
    """Times the importance weight, and not at a token that the teacher did not score."""
    c = columns()
    teacher, divergence = torch.zeros(N), c["entropy"].square().requires_grad_()
    teacher[3] = torch.nan
    settings = GRPO(kl_coefficient=0, importance_cap=1.1)
    given = {
        "loss_weights": torch.full((N,), 1 / N),
        "sequence_ids": c["sequence_ids"],
        "advantages": ZERO,
        "rollout_logprobs": c["old"] + c["rollout"],
        "old_logprobs": c["old"],
        "teacher_logprobs": teacher,
        "teacher_ids": torch.zeros(N, dtype=torch.int64),
    }
    pack: Any = Targets(given)
    forward = Distillation(
        teachers={"large": TeacherConfig(urls=("http://a",))},
        coefficient=0.5,
        divergence="forward_topk",
        top_k=4,
    )
    scores = TokenScores(c["logprobs"], c["entropy"], torch.empty(0), divergence)
    loss_of = policy_loss(settings, Update(kl_coefficient=0, distillation=forward))
    loss, measures = loss_of(pack, scores)
    loss.backward()
    importance = (-c["rollout"]).exp().clamp(max=1.1)
    expected = 0.5 * importance / N
    expected[3] = 0
    assert divergence.grad is not None
    torch.testing.assert_close(divergence.grad, expected)
    torch.testing.assert_close(loss, (expected * divergence).sum())
    known = divergence.detach().where(~teacher.isnan(), 0.0)
    torch.testing.assert_close(measures["kl_teacher"], known.sum())
    assert measures["signal"] == N - 1
    without, measures = loss_of(pack, replace(scores, divergence=None))
    assert without == 0 == measures["kl_teacher"], "a pack that the teacher gave no tokens for"

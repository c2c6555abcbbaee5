"""Losses against TRL's, value and gradient, where TRL has the same formula. Advantages are not
among them: TRL computes them in the middle of its rollouts.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.algorithms.aggregation import token_weights
from megavlm.config.algorithm import DPO, GRPO
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.models.common.logprobs import TokenScores
from megavlm.training.losses import Update, policy_loss, preference_loss
from tests.support.columns import columns as target_columns
from tests.support.timeouts import scaled

PROGRAM = Path(__file__).with_name("trl_losses.py")
LENGTHS, LONGEST = [5, 2, 7, 1, 4], 7

# name -> (TRL's settings, ours)
SAME: dict[str, tuple[dict[str, Any], GRPO]] = {
    "GRPO": (
        {"beta": 0.1},
        GRPO(loss_aggregation="sequence_mean", kl_coefficient=0.1),
    ),
    "DAPO with entropy": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.02},
        GRPO(clip_high=0.28, kl_coefficient=0, entropy_coefficient=0.02),
    ),
    "Dr. GRPO": ({"loss_type": "dr_grpo"}, GRPO(loss_aggregation="constant", kl_coefficient=0)),
    "two-sided clipping": (
        {"loss_type": "bnpo", "delta": 1.3},
        GRPO(dual_clip=1.3, kl_coefficient=0),
    ),
    "GSPO": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        GRPO(
            policy_loss="gspo",
            loss_aggregation="sequence_mean",
            clip_low=0.03,
            clip_high=0.04,
            kl_coefficient=0,
            importance="sequence",
        ),
    ),
    "CISPO": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        GRPO(policy_loss="cispo", clip_low=1.0, clip_high=0.2, kl_coefficient=0),
    ),
    "SAPO": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.25},
        GRPO(
            policy_loss="sapo",
            loss_aggregation="sequence_mean",
            tau_pos=0.75,
            tau_neg=1.25,
            kl_coefficient=0,
        ),
    ),
    "unbiased KL": (
        {"loss_type": "bnpo", "beta": 0.1, "unbiased_kl": True},
        GRPO(kl_estimator="unbiased", kl_coefficient=0.1),
    ),
}
# Pairs: the first two sequences with the next two. TRL has conservative DPO under the name of the
# loss of sorted batches, which it is for a pair alone.
PAIRS: dict[str, tuple[dict[str, Any], DPO]] = {
    "DPO": ({"beta": 0.3}, DPO(beta=0.3)),
    "IPO": ({"loss_types": ["ipo"], "beta": 0.2}, DPO(loss_type="ipo", beta=0.2)),
    "hinge": ({"loss_types": ["hinge"]}, DPO(loss_type="hinge")),
    "DPO per token": ({"loss_types": ["sigmoid_norm"]}, DPO(loss_type="sigmoid_norm")),
    "robust DPO": (
        {"loss_types": ["robust"], "label_smoothing": 0.1},
        DPO(loss_type="robust", label_smoothing=0.1),
    ),
    "with the likelihood of the chosen": (
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "pairs": 1},
        DPO(sft_coefficient=0.3),
    ),
    "conservative DPO": (
        {"loss_types": ["aot"], "label_smoothing": 0.2, "pairs": 1},
        DPO(label_smoothing=0.2),
    ),
}


@dataclass
class Targets:
    """What a loss reads of a pack."""

    columns: TargetColumns
    num_targets: int
    num_sequences: int


@pytest.fixture(scope="module")
def columns() -> dict[str, torch.Tensor]:
    """[B, T] each, float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), LONGEST)
    names = ("logprobs", "old", "reference", "rollout", "entropy", "advantages")
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 for name in names
    }
    base = torch.randn(shape, generator=generator, dtype=torch.float64) - 2
    for name in ("logprobs", "old", "reference", "rollout"):
        drawn[name] += base
    drawn["advantages"] = drawn["advantages"][:, :1].expand(shape) * 5
    drawn["mask"] = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).double()
    return drawn


@pytest.fixture(scope="module")
def theirs(columns: dict[str, torch.Tensor]) -> dict[str, Any]:
    given = {
        "columns": {name: rows.tolist() for name, rows in columns.items()},
        "settings": {name: settings for name, (settings, _) in SAME.items()},
        "pairs": {name: columns[name][:4].tolist() for name in ("logprobs", "reference", "mask")},
        "pair_settings": {name: settings for name, (settings, _) in PAIRS.items()},
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=scaled(250),
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_equals_trl(columns: dict[str, torch.Tensor], theirs: dict[str, Any], name: str) -> None:
    settings = SAME[name][1]
    mask = columns["mask"].bool()
    c = {key: rows[mask] for key, rows in columns.items()}
    weights = token_weights(LENGTHS, [True] * 5, settings.loss_aggregation, LONGEST)
    lengths = torch.tensor(LENGTHS)
    given = target_columns(
        int(mask.sum()),
        loss_weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
        sequence_ids=torch.arange(5).repeat_interleave(lengths),
        advantages=c["advantages"],
        old_logprobs=c["old"],
        rollout_logprobs=c["rollout"],
        reference_logprobs=c["reference"],
    )
    pack: Any = Targets(given, int(mask.sum()), len(LENGTHS))
    logprobs = c["logprobs"].clone().requires_grad_()
    scores = TokenScores(logprobs, c["entropy"], torch.empty(0))
    update = Update(kl_coefficient=settings.kl_coefficient)
    loss, measures = policy_loss(settings, update)(pack, scores)
    loss.backward()
    assert loss.item() == pytest.approx(theirs[name]["loss"], rel=1e-9)
    gradient = torch.tensor(theirs[name]["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient[mask], rtol=1e-9, atol=1e-12)
    assert measures["clipped"] < measures["tokens"]
    # Bounds matter here; SAPO's gate has none.
    assert (measures["clipped"] > 0) == (settings.policy_loss != "sapo")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_equal_trl(
    columns: dict[str, torch.Tensor], theirs: dict[str, Any], name: str
) -> None:
    """Values, gradients and metrics."""
    given, settings = PAIRS[name]
    pairs = given.get("pairs", 2)
    rows = torch.tensor([i + 2 * j for j in range(2) for i in range(pairs)])
    mask = columns["mask"][rows].bool()
    c = {key: x[rows][mask] for key, x in columns.items()}
    place = torch.arange(2 * pairs)[:, None].expand(mask.shape)[mask]
    own = target_columns(
        int(mask.sum()),
        loss_weights=torch.full_like(c["logprobs"], 1 / pairs),
        sequence_ids=place % pairs,
        reference_logprobs=c["reference"],
        is_chosen=place < pairs,
    )
    pack: Any = Targets(own, int(mask.sum()), pairs)
    logprobs = c["logprobs"].clone().requires_grad_()
    loss, measures = preference_loss(settings)(
        pack, TokenScores(logprobs, torch.empty(0), torch.empty(0))
    )
    loss.backward()
    expected, metrics = theirs[name], theirs[name]["metrics"]
    assert loss.item() == measures["loss"].item() == pytest.approx(expected["loss"], rel=1e-9)
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(logprobs.grad, gradient[mask], rtol=1e-9, atol=1e-12)
    assert measures["pairs"] == pytest.approx(pairs)
    for measure, metric in {
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "preferred": "rewards/accuracies",
    }.items():
        assert measures[measure] / pairs == pytest.approx(metrics[metric], rel=1e-6)

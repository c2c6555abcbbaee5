"""Training with adapters: dropout under recomputation, and checkpoints that any layout resumes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.config.lora import LoRA
from megavlm.config.optimizer import Optimizer
from megavlm.models.common.lora import adapters
from megavlm.parallel.mesh import Layout
from megavlm.training.optimizer import Updater, build_updater
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.lora_reference import ALPHA, RANK
from tests.support.lora_runs import (
    DENSE,
    EXPERTS,
    TOWER,
    Run,
    lora_folder,
    main_gradients,
    set_pairs,
    start,
    whole_pairs,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def dense() -> Path:
    return lora_folder("qwen2_5_vl")


@pytest.fixture(scope="module")
def moe() -> Path:
    return lora_folder("qwen3_vl_moe")


def gradients(
    folder: Path, ranks: Ranks, targets: tuple[str, ...], dropout: float, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    run = start(folder, ranks, **options)
    run.add(LoRA(rank=RANK, alpha=ALPHA, dropout=dropout, targets=targets))
    set_pairs(run)
    run.backward()
    return {
        f"{name}.{part}": a
        for name, layer in adapters(run.whole)
        for part, (a, _) in main_gradients(layer).items()
    }


FULL = {"recompute": "full", "recompute_layers": 2}


@pytest.mark.parametrize("layout", ["TP2+SP", *slow("one rank", "TP2")])
def test_recomputation_drops_what_the_forward_pass_dropped(dense: Path, layout: str) -> None:
    ranks = LAYOUTS[layout]
    kept = launch(ranks.world_size, gradients, dense, ranks, DENSE, 0.5, {})
    again = launch(ranks.world_size, gradients, dense, ranks, DENSE, 0.5, FULL)
    without = launch(ranks.world_size, gradients, dense, ranks, DENSE, 0.0, {})
    for rank in range(ranks.world_size):
        for name, gradient in kept[rank].items():
            np.testing.assert_allclose(again[rank][name], gradient, atol=1e-6 * gradient.max())
            assert abs(without[rank][name] - gradient).max() > 1e-2 * abs(gradient).max()
            if not name.endswith(("o_proj", "down_proj")):  # whole on every rank
                np.testing.assert_array_equal(gradient, kept[0][name])


def test_experts_drop_again_what_they_dropped(moe: Path) -> None:
    ranks = EXPERT_LAYOUTS["EP2 over TP2+SP"]
    kept = launch(ranks.world_size, gradients, moe, ranks, EXPERTS, 0.5, {})
    again = launch(ranks.world_size, gradients, moe, ranks, EXPERTS, 0.5, FULL)
    for rank in range(ranks.world_size):
        for name, gradient in kept[rank].items():
            np.testing.assert_allclose(again[rank][name], gradient, atol=1e-6 * gradient.max())


def trained_of_a_critic(folder: Path) -> list[str]:
    run = start(folder, LAYOUTS["one rank"], head="values")
    run.add(LoRA(rank=RANK, alpha=ALPHA, targets=("language.mlp",)))
    return [name for name, p in run.whole.named_parameters() if p.requires_grad]


def test_a_value_head_learns_beside_adapters(dense: Path) -> None:
    (names,) = launch(1, trained_of_a_critic, dense)
    assert {name for name in names if "lora_" not in name} == {
        "0.value_head.weight",
        "0.value_head.bias",
    }


@dataclass
class Training:
    run: Run
    updater: Updater

    def update(self) -> None:
        self.updater.zero_gradients()
        self.run.backward()
        self.updater.step()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "chunks": self.run.chunks,
            "optimizer": self.updater.optimizer,
            "scheduler": self.updater.scheduler,
        }


def train(folder: Path, ranks: Ranks, targets: tuple[str, ...]) -> Training:
    run = start(folder, ranks)
    run.add(LoRA(rank=RANK, alpha=ALPHA, targets=targets))
    set_pairs(run)
    updater = build_updater(run.chunks, Optimizer(lr=1e-2, clip_grad=0.5), run.mesh, num_steps=3)
    run.wrapped = updater.chunks
    return Training(run, updater)


def save(folder: Path, ranks: Ranks, targets: tuple[str, ...], saved: Path) -> Any:
    """Pairs at the step that is saved and one step later."""
    training = train(folder, ranks, targets)
    training.update()
    save_checkpoint(SaveTarget(saved), 1, training.updater, extra={})
    pairs = whole_pairs(training.run)
    training.update()
    return pairs, whole_pairs(training.run)


def resume(folder: Path, ranks: Ranks, targets: tuple[str, ...], saved: Path) -> Any:
    training = train(folder, ranks, targets)
    load_checkpoint(saved, **training.state)
    pairs = whole_pairs(training.run)
    training.update()
    return pairs, whole_pairs(training.run)


@pytest.mark.parametrize(
    ("model", "targets", "first", "second"),
    [
        ("dense", DENSE + TOWER, LAYOUTS["TP2+SP"], LAYOUTS["PP2"]),
        *slow(
            ("dense", DENSE, LAYOUTS["one rank"], LAYOUTS["TP4"]),
            ("moe", EXPERTS, Ranks(Layout(expert_tensor=2), data=2), LAYOUTS["one rank"]),
        ),
    ],
)
def test_another_layout_resumes(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: str,
    targets: tuple[str, ...],
    first: Ranks,
    second: Ranks,
) -> None:
    folder = request.getfixturevalue(model)
    arguments = (folder, first, targets, tmp_path)
    before, after = merged(launch(first.world_size, save, *arguments))
    arguments = (folder, second, targets, tmp_path)
    loaded, resumed = merged(launch(second.world_size, resume, *arguments))
    assert before.keys() == loaded.keys()
    for name, pair in before.items():
        for ours, theirs, later, expected in zip(
            loaded[name], pair, resumed[name], after[name], strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
            assert abs(expected - theirs).max() > 1e-3  # it moved
            np.testing.assert_allclose(later, expected, atol=1e-5)


def merged(results: list[Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What ranks hold of the model, together."""
    whole: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for result in results:
        for pairs, part in zip(whole, result, strict=True):
            pairs |= part
    return whole

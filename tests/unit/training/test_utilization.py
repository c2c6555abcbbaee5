"""FLOPs of a step against seconds, with numbers that a pencil gives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.config.load import load
from megavlm.data.packs.trees import Segment, Tree
from megavlm.models.cost import ModelCost
from megavlm.parallel import platform
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.utilization import StepFlops, utilization

COST = ModelCost(per_token=10.0, per_pair=1.0, per_patch=3.0, per_patch_pair=0.0)


def segment(length: int, parent: int, images: tuple[str, ...] = ()) -> Segment:
    ids = torch.zeros(length)
    return Segment(ids, ids, parent, parent >= 0, images=images)


def test_flops_of_a_step() -> None:
    """A prompt of two tokens with an image, and two responses of one token; twice."""
    tree = Tree((segment(2, -1, ("a",)), segment(1, 0), segment(1, 0)))
    images: Any = {
        "a": SimpleNamespace(medium="image", grids=((1, 2, 2),)),
        "b": SimpleNamespace(medium="image", grids=((1, 2, 4),)),
    }
    flops = StepFlops.of(COST, [tree, tree], images, output=100.0)
    attended = 2 * 1.5 + 2 * (2 + 1)
    assert flops == StepFlops(2 * (4 * 10 + attended + 2 * 100), 3 * 4 + 3 * 8)


def test_phases_of_frozen_and_trained_towers() -> None:
    flops, passes = StepFlops(100.0, 7.0), {"update": 3.0, "reference": 1.0}
    frozen = flops.by_phase(passes, tower_trained=False)
    assert frozen == {
        "update": StepFlops(300.0, 0.0),
        "reference": StepFlops(100.0, 0.0),
        "vision": StepFlops(0.0, 7.0),
    }
    trained = flops.by_phase(passes, tower_trained=True)
    assert trained == {"update": StepFlops(300.0, 21.0), "reference": StepFlops(100.0, 7.0)}


def test_utilization() -> None:
    work = {
        "update": StepFlops(300.0, 0.0),
        "vision": StepFlops(0.0, 50.0),
        "old_logprobs": StepFlops(0.0, 0.0),
    }
    seconds = {"seconds/update": 3.0, "seconds/total": 9.0}
    assert utilization(work, seconds, None, 2) == {"flops_per_second": 100.0}
    on_gpus = utilization(work, seconds, 250.0, 2)
    assert on_gpus == pytest.approx(
        {
            "flops_per_second": 100.0,
            "mfu": 0.2,
            "modelled/update": 300 / 0.46 / 500,
            "modelled/vision": 50 / 0.21 / 500,
        }
    )


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"algorithm": {"name": "grpo", "epochs": 2}}, 6.0),
        ({"algorithm": {"name": "grpo"}, "lora": {"rank": 4}}, 2.0),
        ({"algorithm": {"name": "sft"}}, 3.0),
    ],
)
def test_passes_of_an_update(write_recipe: Any, sections: Any, expected: float) -> None:
    trainer: Any = SimpleNamespace(
        train_state=SimpleNamespace(config=load(write_recipe(**sections)))
    )
    assert BaseTrainer.update_passes.fget is not None
    assert BaseTrainer.update_passes.fget(trainer) == expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_peaks_of_gpus(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    assert platform.peak_flops() == peak


def test_a_cpu_has_no_peak() -> None:
    if not platform.has_gpu():
        assert platform.peak_flops() is None

"""Checkpoints go from the CPU's layers and optimizer to Transformer Engine's, and back: the same
weights, optimizer state and next updates.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.parallel import platform
from megavlm.parallel.mesh import Layout
from tests.distributed.test_lora_training import train as lora_training
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.lora_runs import EXPERTS, lora_folder
from tests.unit.checkpointing.ranks import assert_equal_tensors, make_hf, start

RANKS = LAYOUTS | EXPERT_LAYOUTS | {"ETP2": Ranks(Layout(expert_tensor=2), data=2)}


def train(hf: Path, ranks: Ranks, source: Path | None, target: Path) -> None:
    """Save step 3, trained or as loaded, and step 5."""
    run = start(hf, ranks, freeze=False)
    if source is None:
        run.train(range(3))
    else:
        run.load(source, 3)
    run.save(target, 3)
    run.train(range(3, 5))
    run.save(target, 5)


def train_adapters(hf: Path, ranks: Ranks, source: Path | None, target: Path) -> None:
    """As `train`, with adapters on experts."""
    training = lora_training(hf, ranks, EXPERTS)
    if source is None:
        for _ in range(3):
            training.update()
    else:
        load_checkpoint(source, step=3, **training.state)
    save_checkpoint(SaveTarget(target), 3, training.updater, extra={})
    training.update()
    training.update()
    save_checkpoint(SaveTarget(target), 5, training.updater, extra={})


WORK = {"all": train, "adapters": train_adapters}


PathName = Literal["cpu", "gpu"]


def work(path: str, hf: Path, layout: str, source: Path | None, target: Path, trained: str) -> None:
    """Train on ranks of this process, which is on the path."""
    assert path == ("gpu" if platform.has_gpu() else "cpu")
    ranks = RANKS[layout]
    launch(ranks.world_size, WORK[trained], hf, ranks, source, target)


class OnPaths:
    """Trains on ranks of this process, and of one on the GPU path."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(
        self,
        path: PathName,
        hf: Path,
        layout: str,
        source: Path | None,
        target: Path,
        trained: str = "all",
    ) -> Path:
        """Return the checkpoints."""
        if path == "cpu":
            work(path, hf, layout, source, target, trained)
            return target
        assert self._process.stdin is not None and self._process.stdout is not None
        job = [path, str(hf), layout, str(source or ""), str(target), trained]
        print(json.dumps(job), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n", "it has said why on stderr"
        return target


@pytest.fixture(scope="module")
def on_path() -> Iterator[OnPaths]:
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MEGAVLM_GPU_PATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield OnPaths(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2_5_vl", "TP2+SPxPP2"), ("qwen3_vl_moe", "EP2"), ("qwen3_5", "TP2")],
)
def test_a_run_goes_on_on_the_other_path(
    on_path: OnPaths, family: str, layout: str, tmp_path: Path
) -> None:
    hf = make_hf(tmp_path / "hf", family=family)
    paths: tuple[PathName, ...] = ("cpu", "gpu")
    for path, other in (paths, paths[::-1]):
        stays = on_path(path, hf, layout, None, tmp_path / path)
        goes = on_path(other, hf, layout, stays, tmp_path / f"{path} to {other}")
        assert_goes_on(stays, goes)


def assert_goes_on(stays: Path, goes: Path) -> None:
    assert_equal_tensors(stays, goes, 3)
    expected, found = (StepReader(step_folder(folder, 5)) for folder in (stays, goes))
    assert found.tensors.keys() == expected.tensors.keys()
    for key in expected.tensors:
        whole = expected.read(key)
        bound = 2e-5 * whole.abs().max().item()  # of tests/distributed/test_updates.py
        np.testing.assert_allclose(found.read(key), whole, rtol=0, atol=bound, err_msg=key)


@pytest.mark.slow
def test_adapters_of_experts_go_on_together_and_one_by_one(
    on_path: OnPaths, tmp_path: Path
) -> None:
    """Under other layouts too: the CPU computes experts one after the other."""
    hf = lora_folder("qwen3_vl_moe")
    for name, first, second, other in (
        ("to", "cpu", "gpu", "ETP2"),
        ("back", "gpu", "cpu", "one rank"),
    ):
        stays = on_path(first, hf, "EP2", None, tmp_path / name, "adapters")
        goes = on_path(second, hf, "EP2", stays, tmp_path / f"{name} there", "adapters")
        assert_goes_on(stays, goes)
        moved = on_path(second, hf, other, stays, tmp_path / f"{name} {other}", "adapters")
        assert_equal_tensors(stays, moved, 3)


if __name__ == "__main__":
    for line in sys.stdin:
        path, hf, layout, source, target, trained = json.loads(line)
        work(path, Path(hf), layout, Path(source) if source else None, Path(target), trained)
        print("done", flush=True)

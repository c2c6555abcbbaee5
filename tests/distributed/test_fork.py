"""Ranks of tests: results and errors come back, and a test finds nothing of the one before."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megavlm.parallel.mesh import Layout, build_mesh
from tests.support import fork
from tests.support.fork import launch
from tests.support.timeouts import scaled

pytestmark = pytest.mark.distributed


def state() -> tuple[bool, str | None, int]:
    """Return what a rank of another test could have left, and leave something."""
    found = (
        parallel_state.model_parallel_is_initialized(),
        os.environ.get("LEFT_BEHIND"),
        torch.initial_seed(),
    )
    os.environ["LEFT_BEHIND"] = "yes"
    torch.manual_seed(found[2] + 1)
    return found


def coordinates(layout: Layout) -> tuple[Any, ...]:
    found = state()
    mesh = build_mesh(layout)
    total = torch.ones(1)
    dist.all_reduce(total)
    return found, mesh.tensor_rank, mesh.pipeline_rank, mesh.data_rank, int(total)


TENSOR, PIPELINE = Layout(tensor=2), Layout(pipeline=2)


@pytest.mark.parametrize("order", [(TENSOR, PIPELINE), (PIPELINE, TENSOR)], ids=["TP", "PP"])
def test_a_layout_follows_another(order: tuple[Layout, Layout]) -> None:
    fresh = (False, None, torch.initial_seed())
    for layout in order:
        other = (1, 0) if layout is TENSOR else (0, 1)
        assert launch(2, coordinates, layout) == [(fresh, 0, 0, 0, 2), (fresh, *other, 0, 2)]


def fail(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("no such layout")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", r"rank 1 of 2:\n[^$]*ValueError: no such layout"),
        ("dies", r"rank 1 of 2:\ndied without a word"),
        ("hangs", rf"ranks \[0, 1\] gave no result within {scaled(1)} s"),
    ],
)
def test_a_failure_is_told_and_the_next_launch_works(
    monkeypatch: pytest.MonkeyPatch, how: str, error: str
) -> None:
    monkeypatch.setattr(fork, "GRACE", 0.5)
    with pytest.raises(RuntimeError if how != "hangs" else TimeoutError, match=error):
        launch(2, fail, how, timeout=1 if how == "hangs" else 60)
    assert launch(2, dist.get_rank) == [0, 1]


def die_beside_one_that_ends_late() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=time.sleep, args=(60,)).start()  # an interpreter waits for its threads
    dist.barrier()


def test_a_death_is_told_before_the_other_rank_has_ended() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2:\ndied without a word"):
        launch(2, die_beside_one_that_ends_late)


def import_it() -> bool:
    known = "slow_to_import" in sys.modules
    import slow_to_import  # type: ignore[import-not-found]

    return known and slow_to_import.X == 5


def test_what_a_rank_imports_the_next_ones_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow_to_import.py").write_text("X = 5")
    monkeypatch.syspath_prepend(tmp_path)
    assert launch(1, import_it) == [False], "it is no package's"
    assert launch(1, import_it) == [False]
    monkeypatch.setattr(fork, "PACKAGES", str(tmp_path))
    assert launch(1, import_it) == [False]
    assert launch(2, import_it) == [True, True]
    del sys.modules["slow_to_import"]

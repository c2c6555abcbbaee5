"""Saves beside training: what is saved, when it appears, and what a failure does."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megavlm.checkpointing import saver
from megavlm.checkpointing.folder import Manifest, complete_steps, latest_step, step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.retention import Retention
from megavlm.checkpointing.save import SaveTarget
from megavlm.checkpointing.saver import Saver
from megavlm.checkpointing.snapshot import Snapshot, Written
from megavlm.parallel.collectives import any_rank
from megavlm.process import CheckpointError
from megavlm.training.guards import StopRequest, TimeLimit
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.timeouts import scaled
from tests.unit.checkpointing.ranks import TP2, Run, make_hf, start


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf"), num_layers=1)


def keeper(hf: Path, folder: Path, **retention: Any) -> Saver:
    return Saver(SaveTarget(folder, hf, retention=Retention(**retention)), background=True)


def save(to: Saver, run: Run, step: int, extra: dict[str, Any] | None = None, **more: Any) -> None:
    to.save(step, run.updater, extra=extra or {}, **more)


class Gate:
    """Holds the writing of one rank's shards until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int) -> None:
        self._open = threading.Event()
        write: Callable[[Snapshot], Written] = Snapshot.write

        def held(snapshot: Snapshot) -> Written:
            if dist.get_rank() == rank:
                assert self._open.wait(scaled(180))
            return write(snapshot)

        patch.setattr(Snapshot, "write", held)

    def open(self) -> None:
        self._open.set()


def change_everything(run: Run, extra: dict[str, Any]) -> None:
    """Frozen weights, optimizer state, schedule and random states too."""
    run.train(range(5, 7))
    with torch.no_grad():
        for chunk in run.chunks:
            for tensor in [*chunk.parameters(), *chunk.buffers()]:
                tensor.fill_(7)
        for part in run.updater.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.fill_(7)
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(7)
    torch.rand(3)
    extra["seen"].append(7)


def save_twice(hf: Path, ranks: Ranks, folder: Path, options: dict[str, Any]) -> list[Any]:
    """The same step at once, and held by its last rank while everything changes."""
    run = start(hf, ranks, **options)
    run.train(range(2))
    run.save(folder / "at_once", 2, {"seen": [1]})
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, rank=1)
        with keeper(hf, folder / "beside") as beside:
            extra = {"seen": [1]}
            save(beside, run, 2, extra, scores={"reward": 0.5})
            change_everything(run, extra)
            beside.poll()  # does not wait
            dist.barrier()
            seen.append(latest_step(folder / "beside"))
            dist.barrier()
            gate.open()
            beside.finish()
            seen.append(latest_step(folder / "beside"))
            beside.poll()
    return seen


def load(hf: Path, ranks: Ranks, folder: Path, options: dict[str, Any]) -> Any:
    run = start(hf, ranks, seed=99, **options)
    extra = run.load(folder)
    return extra, run.fingerprint()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "options"),
    [("DP2", {"dtype": torch.bfloat16}), *slow(("TP2", {"freeze": False}), ("DP2", {}))],
)
def test_the_saved_bytes_are_the_snapshots(
    hf: Path, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """And the step appears when the last rank has written, not before."""
    ranks = LAYOUTS[layout]
    assert launch(2, save_twice, hf, ranks, tmp_path, options) == [[None, 2], [None, 2]]
    expected, found = (
        StepReader(step_folder(tmp_path / name, 2)) for name in ("at_once", "beside")
    )
    assert set(expected.tensors) == set(found.tensors)
    for key in expected.tensors:
        assert torch.equal(expected.read(key), found.read(key)), key
    one, other = (
        launch(2, load, hf, ranks, tmp_path / name, options) for name in ("at_once", "beside")
    )
    assert one == other and one[0][0] == {"seen": [1]}
    assert Manifest.read(found.folder).scores == {"reward": 0.5}


def save_in_order(hf: Path, folder: Path) -> list[str]:
    run = start(hf, TP2)
    order: list[str] = []
    begin = saver.begin_save
    with pytest.MonkeyPatch.context() as patch, keeper(hf, folder, last=1) as beside:
        gate = Gate(patch, rank=1)

        def noted(target: SaveTarget, step: int, *args: Any, **state: Any) -> Any:
            order.append(f"begin {step}")
            return begin(target, step, *args, **state)

        patch.setattr(saver, "begin_save", noted)

        def later() -> None:
            order.append("open")
            gate.open()

        save(beside, run, 1)
        timer = threading.Timer(0.3, later)
        timer.start()
        save(beside, run, 2)
        timer.join()
    return order


@pytest.mark.distributed
def test_a_second_save_waits_for_the_first(hf: Path, tmp_path: Path) -> None:
    """Leaving the context waits for the last."""
    orders = launch(2, save_in_order, hf, tmp_path)
    assert orders == [["begin 1", "open", "begin 2"]] * 2
    assert complete_steps(tmp_path) == [2] and latest_step(tmp_path) == 2


def save_with_companion(hf: Path, folder: Path, fails: bool) -> list[Any]:
    """Steps that have appeared of a run and of what is saved beside it, while a rank's first part
    is held and in the end.
    """
    run, seen = start(hf, TP2), []
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, rank=1)
        beside = keeper(hf, folder / "run")

        def begin_other(copy: bool) -> saver.PendingSave:
            assert copy, "training goes on"
            target = SaveTarget(folder / "other")
            return saver.begin_save(target, 1, run.updater, extra={}, copy=copy)

        def look() -> None:
            dist.barrier()
            seen.append([complete_steps(folder / name) for name in ("other", "run")])
            dist.barrier()

        if fails and dist.get_rank() == 1:
            held = Snapshot.write

            def full(snapshot: Snapshot) -> Written:
                if "other" in str(snapshot._path):
                    raise OSError("No space left on device")
                return held(snapshot)

            patch.setattr(Snapshot, "write", full)
        save(beside, run, 1, companion=begin_other)
        look()
        gate.open()
        try:
            beside.finish()
        except CheckpointError as error:
            seen.append("No space left" in str(error))
        look()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("fails", [False, True])
def test_a_companion_is_complete_before_the_step_appears(
    hf: Path, tmp_path: Path, fails: bool
) -> None:
    end = [True, [[], []]] if fails else [[[1], [1]]]
    assert launch(2, save_with_companion, hf, tmp_path, fails) == [[[[], []], *end]] * 2
    left = [path.name for path in tmp_path.glob("*/*step*")]
    assert left == ([] if fails else ["step_00000001"] * 2)


def fail_in_the_background(hf: Path, folder: Path) -> str:
    run = start(hf, TP2)
    beside = keeper(hf, folder)
    with pytest.MonkeyPatch.context() as patch:

        def full(_: Snapshot) -> Written:
            raise OSError("No space left on device")

        if dist.get_rank() == 1:
            patch.setattr(Snapshot, "write", full)
        save(beside, run, 1)  # does not fail
        try:
            while beside._running is not None:
                beside.poll()
        except CheckpointError as error:
            beside.finish()  # raised once
            return str(error)
    return ""


@pytest.mark.distributed
def test_a_failure_is_raised_on_all_ranks_between_two_steps(hf: Path, tmp_path: Path) -> None:
    first, second = launch(2, fail_in_the_background, hf, tmp_path)
    assert first == second
    assert first.startswith(
        f"checkpoint of step 1 in {tmp_path} failed on rank 1: No space left on device. Older st"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def fail_in_training(hf: Path, folder: Path) -> int | None:
    """One rank fails with a save held; the other waits for it in one of training's collectives."""
    run = start(hf, TP2)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, rank=1)
        beside = keeper(hf, folder)
        if dist.get_rank() == 0:
            with pytest.raises(ZeroDivisionError), beside:
                save(beside, run, 1)
                raise ZeroDivisionError
            found = latest_step(folder)
            dist.barrier()
            return found
        save(beside, run, 1)
        threading.Timer(0.3, gate.open).start()
        dist.barrier()
        beside.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        return 1


@pytest.mark.distributed
def test_a_save_is_finished_where_training_fails(hf: Path, tmp_path: Path) -> None:
    assert launch(2, fail_in_training, hf, tmp_path) == [1, 1]


def stop_by(number: int) -> list[bool]:
    before = signal.getsignal(number)
    with StopRequest(TimeLimit(None, 0.0)) as stop:
        answers = [stop.agreed()]
        dist.barrier()
        if dist.get_rank() == 1:
            signal.raise_signal(number)
        answers.append(stop.agreed())
    return [*answers, any_rank(signal.getsignal(number) != before)]


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all(number: int) -> None:
    assert launch(2, stop_by, number) == [[False, True, False]] * 2

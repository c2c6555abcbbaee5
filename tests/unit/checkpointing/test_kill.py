"""A save that is killed, or that finds the disk full, leaves the step before as it was."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megavlm.checkpointing import atomic, snapshot
from megavlm.checkpointing import save as saving
from megavlm.checkpointing.folder import Manifest, complete_steps, latest_step
from megavlm.checkpointing.retention import Retention
from megavlm.checkpointing.save import SaveTarget
from megavlm.checkpointing.saver import Saver
from megavlm.checkpointing.snapshot import Snapshot
from megavlm.process import CheckpointError
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.checkpointing.ranks import ONE_RANK, TP2, Run, make_hf, start

# Each is called in a save, in this order; True: killed after the call, not before it; a number: of
# the call, if it is not the first.
WRITE_POINTS: list[tuple[Any, ...]] = [
    (Path, "mkdir", False),
    (atomic, "replace_folder", True),  # of the model's files
    (saving, "write_random_states", True),
    (Snapshot, "write_common", True),
    (Snapshot, "write", False),
    (snapshot, "save_tensor", True),  # in mid-file
    (Snapshot, "write", True),
    (Snapshot, "write_contents", True),
    (Manifest, "write", False),
    (Manifest, "write", True),
    (Path, "write_text", True),
    (atomic, "write_text", True),  # the step is announced
    (atomic, "sync_tree", True, 2),
    (atomic, "replace_folder", True, 2),
    (Path, "write_text", True, 2),
    (atomic, "write_text", True, 2),
    (atomic, "remove_folder", False),
    (shutil, "rmtree", False),  # renamed, its files still there
]
STEP_IS_THERE = WRITE_POINTS.index((atomic, "replace_folder", True, 2))
QUICK_POINTS = (0, STEP_IS_THERE - 1, STEP_IS_THERE, len(WRITE_POINTS) - 1)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf"), num_layers=1)


@pytest.fixture(scope="module")
def first(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run's folder after its first step, and what it was then."""
    folder = tmp_path_factory.mktemp("first")
    (fingerprint,) = launch(1, save_first, hf, folder)
    return folder, fingerprint


def kill_at(owner: Any, name: str, after: bool, call: int = 1) -> None:
    """Replaces a function by one that kills this process and whatever it has forked."""
    os.setpgid(0, 0)
    function: Callable[..., Any] = getattr(owner, name)
    others = iter(range(call - 1))

    def killed(*args: Any, **kwargs: Any) -> Any:
        # The tracker is meant, not extra.json; a deletion, not cleaning.
        if (name == "write_text" and owner is Path and "latest" not in args[0].name) or (
            name == "rmtree" and not args[0].name.endswith(".deleted")
        ):
            return function(*args, **kwargs)
        if next(others, None) is not None:
            return function(*args, **kwargs)
        if after:
            function(*args, **kwargs)
        os.killpg(0, signal.SIGKILL)

    setattr(owner, name, killed)


def save_first(hf: Path, folder: Path) -> list[str]:
    run = start(hf, ONE_RANK)
    run.train(range(1))
    run.save(folder, 1)
    return run.fingerprint()


def saver(folder: Path, *, background: bool, **retention: Any) -> Saver:
    hf_folder = folder / "nothing"
    hf_folder.mkdir(parents=True, exist_ok=True)
    target = SaveTarget(folder, hf_folder, retention=Retention(**retention))
    return Saver(target, background=background)


def save(keeper: Saver, run: Run, step: int) -> None:
    keeper.save(step, run.updater, extra={})


def save_and_die(hf: Path, folder: Path, point: int, background: bool) -> None:
    run = start(hf, ONE_RANK)
    run.load(folder)
    run.train(range(1, 2))
    with saver(folder, background=background, last=1) as keeper:
        kill_at(*WRITE_POINTS[point])
        save(keeper, run, 2)


def resume(hf: Path, folder: Path, step: int) -> list[str]:
    run = start(hf, ONE_RANK, seed=99)
    run.load(folder)
    fingerprint = run.fingerprint()
    run.train(range(step, step + 1))
    run.save(folder, step + 1)
    return fingerprint


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("point", "background"),
    [
        *((point, True) for point in QUICK_POINTS),
        *slow(*((x, True) for x in range(len(WRITE_POINTS)) if x not in QUICK_POINTS)),
        *slow(*((point, False) for point in QUICK_POINTS)),
    ],
)
def test_a_killed_save_leaves_the_step_before(
    hf: Path, first: tuple[Path, list[str]], tmp_path: Path, point: int, background: bool
) -> None:
    folder, (before, fingerprint) = tmp_path / "run", first
    shutil.copytree(before, folder)
    with pytest.raises(RuntimeError, match="died without a word"):
        launch(1, save_and_die, hf, folder, point, background)

    step = 2 if point >= STEP_IS_THERE else 1
    assert latest_step(folder) == step
    (resumed,) = launch(1, resume, hf, folder, step)
    assert (resumed == fingerprint) == (step == 1)
    assert latest_step(folder) == step + 1
    # Where the kill hit the deletion, a half-deleted step has not kept its name.
    deleting = WRITE_POINTS[point][0] is shutil
    assert complete_steps(folder) == ([2, 3] if deleting else [*range(1, step + 2)])
    assert not list(folder.glob(".*")), "nothing partial"


def processes_after_a_save(hf: Path, folder: Path) -> int:
    run = start(hf, ONE_RANK)
    with saver(folder, background=True) as keeper:
        save(keeper, run, 1)
        during = len(psutil.Process().children(recursive=True))
    return during + len(psutil.Process().children(recursive=True))


@pytest.mark.distributed
def test_a_save_leaves_no_process_that_would_outlive_a_kill(hf: Path, tmp_path: Path) -> None:
    assert launch(1, processes_after_a_save, hf, tmp_path) == [0]


def save_on_a_full_disk(hf: Path, folder: Path, limit: int, background: bool) -> str:
    run = start(hf, TP2)
    run.train(range(2))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, no kill
    keeper = saver(folder, background=background)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(keeper, run, 2)
        keeper.finish()
    except CheckpointError as error:
        return str(error)
    return ""


def save_under_tp2(hf: Path, folder: Path) -> None:
    run = start(hf, TP2)
    run.train(range(1))
    with saver(folder, background=False) as keeper:
        save(keeper, run, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("background", [True, *slow(False)])
def test_a_full_disk_is_an_error_on_every_rank(hf: Path, tmp_path: Path, background: bool) -> None:
    launch(2, save_under_tp2, hf, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    messages = launch(2, save_on_a_full_disk, hf, tmp_path, 100_000, background)
    for message in messages:
        assert f"checkpoint of step 2 in {tmp_path} failed on rank 0: " in message
        assert "File too large" in message and ".distcp" in message
        assert "Older steps are intact" in message and "GB are free there." in message
        assert "\n" not in message
    assert messages[0] == messages[1]
    assert sorted(tmp_path.rglob("*")) == before
    assert latest_step(tmp_path) == 1


# The first write that finds no room, and the rank that makes it.
FULL = [
    (Snapshot, "write_common", 0),
    (saving, "write_random_states", 1),
    (snapshot, "save_tensor", 1),
    (Snapshot, "write_contents", 0),
    (Manifest, "write", 0),
    (atomic, "replace_folder", 0),
]


def fill_up(hf: Path, folder: Path, background: bool) -> list[str]:
    """The disk is full at each point in turn; then there is room."""
    run = start(hf, TP2)
    run.train(range(1))
    messages = []
    with saver(folder, background=background) as keeper:
        save(keeper, run, 1)
        for owner, name, rank in FULL:
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == rank:
                    patch.setattr(owner, name, no_room)
                with pytest.raises(CheckpointError) as failure:
                    save(keeper, run, 2)
                    keeper.finish()
                messages.append(str(failure.value))
            if dist.get_rank() == 0:
                assert not list(folder.glob(".*")), "nothing partial"
        save(keeper, run, 3)
    return messages


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


@pytest.mark.distributed
@pytest.mark.parametrize("background", [True, False])
def test_a_disk_may_be_full_at_any_write(hf: Path, tmp_path: Path, background: bool) -> None:
    """No rank is left waiting, nothing is left over, and a later save works."""
    first, second = launch(2, fill_up, hf, tmp_path, background)
    assert first == second
    for message, (_, _, rank) in zip(first, FULL, strict=True):
        assert f"failed on rank {rank}: [Errno 28] No space left on device: 'a file'. O" in message
    assert complete_steps(tmp_path) == [1, 3] and latest_step(tmp_path) == 3
    assert not list(tmp_path.glob(".*"))

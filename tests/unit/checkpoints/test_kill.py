"""A save that is killed, or that finds the disk full, leaves the step before as it was."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from megatron.core import dist_checkpointing

from megavlm import checkpointing
from megavlm.checkpointing import atomic, random_states
from megavlm.checkpointing import folder as form
from megavlm.checkpointing.together import CheckpointError
from tests.distributed.fork import launch
from tests.unit.checkpoints.ranks import ONE_RANK, TP2, make_hf, start

# Each is called once in a save, in this order; True: killed after the call, not before it.
WRITE_POINTS = [
    (Path, "mkdir", False),
    (dist_checkpointing, "save", False),
    (dist_checkpointing, "save", True),
    (random_states, "write", True),
    (form.Manifest, "write", False),
    (form.Manifest, "write", True),
    (atomic, "sync_tree", True),
    (atomic, "replace_folder", True),
    (Path, "write_text", True),
    (atomic, "write_text", True),
]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf"), num_layers=1)


def kill_at(owner: Any, name: str, after: bool) -> None:
    """Replaces a function by one that kills this process and the writers it has forked."""
    os.setpgid(0, 0)
    function: Callable[..., Any] = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        # extra.json is written in mid-save: the tracker is meant here.
        if name == "write_text" and owner is Path and "latest" not in args[0].name:
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


def save_and_die(hf: Path, folder: Path, point: int) -> None:
    run = start(hf, ONE_RANK)
    run.load(folder)
    run.train(range(1, 2))
    kill_at(*WRITE_POINTS[point])
    run.save(folder, 2)


def resume(hf: Path, folder: Path, step: int) -> list[str]:
    run = start(hf, ONE_RANK, seed=99)
    run.load(folder)
    fingerprint = run.fingerprint()
    run.train(range(step, step + 1))
    run.save(folder, step + 1)
    return fingerprint


@pytest.mark.distributed
@pytest.mark.parametrize("point", range(len(WRITE_POINTS)))
def test_a_killed_save_leaves_the_step_before(hf: Path, tmp_path: Path, point: int) -> None:
    (fingerprint,) = launch(1, save_first, hf, tmp_path)
    with pytest.raises(EOFError):  # the rank died before it answered
        launch(1, save_and_die, hf, tmp_path, point)

    tracker_is_written = WRITE_POINTS[point] == (atomic, "write_text", True)
    step = 2 if tracker_is_written else 1
    assert checkpointing.latest(tmp_path) == step
    (resumed,) = launch(1, resume, hf, tmp_path, step)
    assert (resumed == fingerprint) == (step == 1)
    assert checkpointing.latest(tmp_path) == step + 1
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")]


def processes_after_a_save(hf: Path, folder: Path) -> int:
    save_first(hf, folder)
    return len(psutil.Process().children(recursive=True))


@pytest.mark.distributed
def test_a_save_leaves_no_process_that_would_outlive_a_kill(hf: Path, tmp_path: Path) -> None:
    assert launch(1, processes_after_a_save, hf, tmp_path) == [0]


def save_on_a_full_disk(hf: Path, folder: Path, limit: int) -> str:
    run = start(hf, TP2)
    run.train(range(2))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, no kill
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run.save(folder, 2)
    except CheckpointError as error:
        return str(error)
    return ""


def save_under_tp2(hf: Path, folder: Path) -> None:
    run = start(hf, TP2)
    run.train(range(1))
    run.save(folder, 1)


@pytest.mark.distributed
def test_a_full_disk_is_an_error_on_every_rank(hf: Path, tmp_path: Path) -> None:
    launch(2, save_under_tp2, hf, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    messages = launch(2, save_on_a_full_disk, hf, tmp_path, 100_000)
    for message in messages:
        assert f"checkpoint of step 2 in {tmp_path} failed on rank 0: " in message
        assert "Older steps are intact" in message and "GB are free there." in message
        assert "\n" not in message
    assert sorted(tmp_path.rglob("*")) == before
    assert checkpointing.latest(tmp_path) == 1

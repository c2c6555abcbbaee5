"""A supervised run that is asked to stop leaves a checkpoint, and the same command goes on from it,
bit for bit.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from megavlm.checkpointing.folder import complete_steps, latest_step, step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.process import ExitCode
from megavlm.run.checks.run_lock import run_lock
from tests.e2e.conftest import WAIT, World
from tests.support.forked import forking

STEPS = 16


def recipe(world: World, name: str) -> Path:
    return world.recipe(
        name,
        algorithm={"name": "sft", "batch_size": 8, "steps": STEPS},
        model={"freeze_tower": False, "freeze_merger": False},
        parallel={"data": 2},
        optimizer={"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine"},
        checkpoint={"every": 2, "keep_last": 1, "best_metric": "loss", "best_mode": "min"},
    )


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_the_run_ends(world: World) -> None:
    path = recipe(world, "hangs")
    command = [sys.executable, "-m", "megavlm", "train", str(path), "algorithm.steps=100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "run.watchdog=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as run:
        assert run.stdout is not None
        wait_for_checkpoint(run, world.root / "hangs/checkpoints")
        ranks = second_rank(run)
        ranks[0].suspend()
        output = run.stdout.read()
    assert run.returncode == ExitCode.HUNG, output
    assert "no progress for 8.0 s (run.watchdog): rank 1 gave no answer" in output
    # The other rank's loop waits for it: in a collective of a step or of a save, for one that it
    # has started, or for the thread that saves.
    threads = (world.root / "hangs/stacks/rank_0.txt").read_text().split("\n\n")
    [loop] = [one for one in threads if re.search(r"base_trainer\.py\", line \d+ in run\n", one)]
    assert "/distributed/" in loop or loop.splitlines()[1].endswith(" in wait"), threads
    assert not any(process.is_running() for process in ranks)


@pytest.mark.slow
def test_nobody_reads_the_output_and_the_disk_is_full_for_the_records(world: World) -> None:
    """Training goes on, and a request to stop still saves."""
    path, folder = recipe(world, "mute"), world.root / "mute/checkpoints"
    command = [sys.executable, "-m", "megavlm", "train", str(path), "algorithm.steps=100000"]
    with forking():
        run = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    with run:
        assert run.stdout is not None and run.stderr is not None
        wait_for_checkpoint(run, folder)
        run.stdout.close()
        metrics = world.root / "mute/metrics.jsonl"
        metrics.rename(metrics.with_suffix(".before"))
        metrics.symlink_to("/dev/full")
        told = ""
        while "metrics cannot be written" not in told or "the output cannot be" not in told:
            line = run.stderr.readline()
            assert line, told
            told += line
        last = latest_step(folder)
        deadline = time.monotonic() + WAIT
        while latest_step(folder) == last:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        told += run.stderr.read()
    assert run.returncode == ExitCode.STOPPED, told
    assert told.count("cannot be written") == 2, "each is told once"


def second_rank(run: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return rank 1 and its descendants."""
    return [
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if process.environ().get("RANK") == "1"
    ]


def using(temporary: Path) -> list[psutil.Process]:
    """Return the processes whose directory for temporary files is in this one."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("TMPDIR", "").startswith(str(temporary))
    ]


def signal_second_rank(run: "subprocess.Popen[str]", number: int, temporary: Path) -> str:
    """Signal rank 1 alone. Returns the output of the run, of which no process is left, so no port,
    and no file in its directory for temporary files.
    """
    assert run.stdout is not None
    started = time.monotonic()
    family = psutil.Process(run.pid).children(recursive=True)
    assert {*family} <= {*using(temporary)}
    second_rank(run)[0].send_signal(number)
    output = run.stdout.read()
    assert time.monotonic() - started < WAIT
    assert not any(process.is_running() for process in family)
    assert not using(temporary)
    assert not list(temporary.glob("megavlm-*"))
    return output


@pytest.mark.slow
def test_a_killed_rank_ends_all(world: World, tmp_path: Path) -> None:
    path, folder = recipe(world, "killed_rank"), world.root / "killed_rank/checkpoints"
    command = [sys.executable, "-m", "megavlm", "train", str(path), "algorithm.steps=100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        wait_for_checkpoint(run, folder)
        output = signal_second_rank(run, signal.SIGKILL, tmp_path)
    assert run.returncode == 128 + signal.SIGKILL, output
    assert latest_step(folder) in complete_steps(folder), "it is whole"
    assert "megavlm: rank 1 ended with SIGKILL" in output


def wait_for_checkpoint(run: "subprocess.Popen[str]", folder: Path) -> None:
    assert run.stdout is not None
    deadline = time.monotonic() + WAIT
    while not (folder / "latest").exists():
        assert run.poll() is None and time.monotonic() < deadline, run.stdout.read()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_step_and_the_run_goes_on(
    world: World, tmp_path: Path
) -> None:
    stopped, folder = recipe(world, "stopped"), world.root / "stopped/checkpoints"
    command = [sys.executable, "-m", "megavlm", "train", str(stopped)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as run:
        wait_for_checkpoint(run, folder)
        output = signal_second_rank(run, signal.SIGUSR1, tmp_path)
    assert run.returncode == ExitCode.STOPPED, output
    step = latest_step(folder)
    assert step is not None and 2 <= step < STEPS, "it was stopped in time"
    assert f"Stopped after step {step}." in output
    again = f"to go on from it: megavlm train {stopped}"
    assert f"megavlm: the last saved step is {step}; {again}\n" in output
    assert len(world.metrics("stopped")) == step
    assert len(complete_steps(folder)) <= 2, "the latest and the best"
    assert not list(folder.glob(".*")), "nothing half-written"

    with run_lock(world.root / "stopped"):
        second = world.megavlm("train", stopped)
    assert second.returncode == 2 and "is in use by process" in second.stderr
    (folder / "latest").unlink()  # as if the run had been killed while it wrote it
    resumed = world.megavlm("train", stopped)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("does not name a complete step") == 1, "one warning, of one rank"
    assert world.megavlm("train", recipe(world, "unstopped")).returncode == 0
    losses = [[one["loss"] for one in world.metrics(name)] for name in ("stopped", "unstopped")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS and losses[0][0] > losses[0][-1]
    readers = [
        StepReader(step_folder(world.root / name / "checkpoints", STEPS))
        for name in ("stopped", "unstopped")
    ]
    assert set(readers[0].tensors) == set(readers[1].tensors)
    for key in readers[0].tensors:
        assert torch.equal(readers[0].read(key), readers[1].read(key)), key
    assert (folder / "best").read_text().startswith("step_")

"""`megavlm train` as a user meets it: real torchrun, ranks whose training program is a stand-in."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from megavlm.inference.server import ClaimedPort
from megavlm.process import ExitCode
from megavlm.run.launcher import is_explained
from tests.support.timeouts import scaled

FAKE_TRAINING = Path(__file__).parent / "fake_training"
WAIT = scaled(240)  # seconds after which something hangs

STOPPING = "megavlm: stopping after this step; Ctrl-C again ends the run at once\n"

WriteRecipe = Callable[..., Path]

pytestmark = pytest.mark.distributed


def environment(**values: str) -> dict[str, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MEGAVLM_")}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        outside.pop(key, None)
    path = os.pathsep.join([str(FAKE_TRAINING), os.environ.get("PYTHONPATH", "")])
    return {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **values}


def command(recipe: Path, seed: int) -> list[str]:
    arguments = ["train", str(recipe), f"run.seed={seed}", "parallel.data=2"]
    return [sys.executable, "-m", "megavlm", *arguments]


def train(recipe: Path, seed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(recipe, seed), env=environment(), capture_output=True, text=True, timeout=WAIT
    )


@contextmanager
def working(
    recipe: Path, seed: int = 4
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command and every process of a run whose ranks are at work; none is left afterwards."""
    process = subprocess.Popen(
        command(recipe, seed),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    family = [psutil.Process(process.pid)]
    try:
        assert process.stdout is not None
        assert "working\n" in iter(process.stdout.readline, "")
        family += family[0].children(recursive=True)
        pids = [path.read_text().split() for path in (recipe.parent / "run").glob("pids-*")]
        assert {int(pid) for pair in pids for pid in pair} <= {child.pid for child in family}
        yield process, family
    finally:
        for handle in family:
            if handle.is_running():
                handle.kill()
        process.communicate(timeout=WAIT)


def nothing_saved(recipe: Path, seed: int) -> str:
    again = " ".join(["megavlm", *command(recipe, seed)[3:]])
    return f"megavlm: no step is saved yet; to start again: {again}\n"


def all_gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=WAIT)
    return not alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "reason"), [(1, "every rank refuses this"), (2, "only rank 1 refuses this")]
)
def test_bad_input_in_a_rank_is_one_sentence(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    reason: str,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    done = train(write_recipe(), seed)
    assert not list((tmp_path / "temporary").iterdir()), "torchrun's folder, too"
    traceback = tmp_path / "run" / "error.txt"
    assert done.stderr == f"megavlm: {reason} (traceback: {traceback})\n"
    assert done.returncode == 2 and reason not in done.stdout
    assert f"ValueError: {reason}" in traceback.read_text()


@pytest.mark.slow
def test_bad_input_on_a_node_is_the_end_of_all(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    port = ClaimedPort()  # the nodes meet there seconds later
    among = ["--nodes", "2", "--master", f"127.0.0.1:{port.number}", "--node-rank"]
    nodes = [
        subprocess.Popen(
            [*command(write_recipe(), seed=2), *among, str(rank)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (node.communicate(timeout=WAIT)[1] for node in nodes)
    assert [node.returncode for node in nodes] == [2, 2]
    assert first.startswith("megavlm: a rank of another node has ended or cannot be reached: ")
    traceback = tmp_path / "run" / "error.txt"
    assert second == f"megavlm: only rank 1 refuses this (traceback: {traceback})\n"
    assert "only rank 1 refuses this" in traceback.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "world_size", "seed", "code", "stderr"),
    [
        ("0", "3", 0, 2, "megavlm: parallel.data=2 x parallel.tensor x parallel.context"),
        ("0", "2", 5, 69, "megavlm: the server did not start\nits last words (traceback: "),
        ("1", "2", 5, 69, ""),
    ],
)
def test_under_a_torchrun_of_the_user_s_rank_0_checks_and_speaks(
    write_recipe: WriteRecipe, rank: str, world_size: str, seed: int, code: int, stderr: str
) -> None:
    done = subprocess.run(
        command(write_recipe(), seed),
        env=environment(RANK=rank, WORLD_SIZE=world_size),
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == code
    assert done.stderr.startswith(stderr) and bool(done.stderr) == bool(stderr)


@pytest.mark.slow
def test_a_fault_of_ours_shows_its_traceback_and_the_rank(write_recipe: WriteRecipe) -> None:
    done = train(write_recipe(), seed=3)
    assert done.returncode == 1
    assert "ZeroDivisionError: a fault of ours" in done.stderr
    assert "ended with exit code 1" in done.stderr.splitlines()[-1]
    assert "ChildFailedError" not in done.stderr


@pytest.mark.slow
def test_a_first_interrupt_asks_to_stop_and_a_second_ends_every_process(
    write_recipe: WriteRecipe,
) -> None:
    recipe = write_recipe()
    with working(recipe, seed=10) as (process, family):  # its ranks do not stop
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == STOPPING
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT)
        assert all_gone(family)
        assert process.returncode == 128 + signal.SIGINT
        assert stderr == nothing_saved(recipe, seed=10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_outside_of_a_step_ends_every_process(
    write_recipe: WriteRecipe, number: signal.Signals
) -> None:
    """As in the start of servers, before there is a step to finish."""
    recipe = write_recipe()
    with working(recipe) as (process, family):
        process.send_signal(number)
        _, stderr = process.communicate(timeout=WAIT)
        assert all_gone(family)
        assert process.returncode == ExitCode.STOPPED
        asked = STOPPING if number == signal.SIGINT else ""
        assert stderr == asked + nothing_saved(recipe, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        (signal.SIGUSR1, "0"),
        (signal.SIGINT, "0"),
        (signal.SIGTERM, "40"),  # torchrun kills its ranks after 30 seconds
    ],
)
def test_a_step_is_finished_and_saved_however_long_it_takes(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    seconds: str,
) -> None:
    monkeypatch.setenv("STEP_SECONDS", seconds)
    recipe = write_recipe()
    with working(recipe, seed=6) as (process, family):
        # Slurm signals every process of a job, a terminal only the command.
        for handle in family[:1] if number == signal.SIGINT else family:
            handle.send_signal(number)
        _, stderr = process.communicate(timeout=WAIT)
        assert all_gone(family)
        assert process.returncode == ExitCode.STOPPED
        asked = STOPPING if number == signal.SIGINT else ""
        assert stderr == asked + nothing_saved(recipe, seed=6)
    assert {path.name for path in (tmp_path / "run").glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_run_listens_on_no_wildcard_address_and_if_killed_leaves_no_rank(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """Nor is the pickle of torchrun's rendezvous in a store, where others could replace it."""
    with working(write_recipe()) as (process, family):
        sockets = [each for handle in family for each in handle.net_connections("inet")]
        listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        assert "127.0.0.1" in listening and not listening & {"0.0.0.0", "::"}
        rank = int((tmp_path / "run" / "pids-0").read_text().split()[0])
        port = int(psutil.Process(rank).environ()["MASTER_PORT"])
        keys = TCPStore("127.0.0.1", port).list_keys()
        assert keys and not any("torch.rendezvous" in key for key in keys)
        process.kill()
        assert all_gone([handle for handle in family if handle.name() != "sleep"])


def test_nodes_that_cannot_meet_are_one_sentence() -> None:
    """Another job's process listens where the first node would."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        agent = [sys.executable, "-m", "megavlm.run.launcher", str(os.getpid())]
        done = subprocess.run(
            [*agent, "--nnodes=2", "--node-rank=0", *master, "--module", "megavlm", "train"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
    assert (done.returncode, done.stdout) == (ExitCode.TRANSIENT, "")
    assert done.stderr.startswith(
        f"megavlm: the nodes of the run do not meet at 127.0.0.1:{port} (The server socket has"
    )
    assert "address already in use" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "code", "explained"),
    [
        (None, -9, False),
        ("75", -9, False),  # by a rank that torchrun stopped because this one was killed
        ("75", 75, True),
        ("69", -9, True),
        ("", -9, True),  # Ctrl-C
    ],
)
def test_who_has_explained_the_end(
    tmp_path: Path, said: str | None, code: int, explained: bool
) -> None:
    reason = tmp_path / "reason"
    if said is not None:
        reason.write_text(said)
    assert is_explained(reason, code) == explained


@pytest.mark.slow
def test_a_killed_rank_is_named(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """The other one, whose collective fails, says nothing, though no request stops it."""
    with working(write_recipe(), seed=10) as (process, family):
        pid = int((tmp_path / "run" / "pids-1").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=WAIT)
        assert all_gone(family)
        assert process.returncode == 128 + signal.SIGKILL
        assert stderr == "megavlm: rank 1 ended with SIGKILL\n"


@pytest.mark.slow
def test_a_killed_launcher_is_named_and_leaves_nothing(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with working(write_recipe(), seed=11) as (process, family):
        assert len(list((tmp_path / "temporary").glob("megavlm-rollout-*"))) == 2
        (launcher,) = family[0].children()
        launcher.kill()
        _, stderr = process.communicate(timeout=WAIT)
        assert all_gone(family)
        assert process.returncode == 128 + signal.SIGKILL
        ended = "megavlm: the launcher of the ranks ended with SIGKILL: start the run again\n"
        assert stderr == ended
    assert not list((tmp_path / "temporary").iterdir())

"""The process that runs the servers of a rollout node."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megavlm.inference.server import HOST
from megavlm.inference.server_process import ServerProcess
from megavlm.slurm.servers import Restarts

ROOT = Path(__file__).parents[3]


Make = Callable[..., Restarts]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function to the supervision of a stub of SGLang, by the name of its node. Nothing is
    left of the processes but their logs.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stub = os.pathsep.join(map(str, [ROOT, ROOT / "tests/fakes/stub_sglang"]))
    environment = {**os.environ, "PYTHONPATH": stub, "STUB": "silent"}
    made: list[Restarts] = []

    def make(node: str = "node", ended: Path | None = None) -> Restarts:
        log = tmp_path / f"run/{node}.log"
        keys = ("a", "b")
        process = ServerProcess(HOST, 10000, [], environment, keys, log, stop_timeout=0)
        made.append(Restarts(process, ended))
        return made[-1]

    yield make
    for restarts in made:
        restarts.server.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no temporary folder"


def look(restarts: Restarts) -> None:
    """Look once whatever was postponed."""
    restarts.due = 0.0
    restarts.look()


def kill(restarts: Restarts) -> None:
    assert restarts.server._process is not None
    restarts.server._process.kill()
    restarts.server._process.wait()


def test_a_server_that_cannot_be_launched_is_tried_again(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that the machine refuses does not end the node's other servers."""
    restarts = make()
    log = restarts.server.log_path
    log.mkdir(parents=True)  # cannot be opened
    for pause in (1, 2):
        look(restarts)
        told = capsys.readouterr().err
        assert "could not be started or stopped: [Errno 21] Is a directory" in told
        assert f"it starts again in {pause} s\n" in told
        assert not restarts.server.running
        assert [path.name for path in tmp_path.iterdir()] == ["run"], "no temporary folder"
    restarts.look()
    assert capsys.readouterr().err == "", "it is not due"
    log.rmdir()
    look(restarts)
    assert restarts.server.running


def test_a_server_starts_again_whatever_the_machine_refuses(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is gone, and its folder cannot be removed."""
    restarts = make()
    look(restarts)
    kill(restarts)
    restarts.server.log_path.unlink()
    remove = shutil.rmtree
    with monkeypatch.context() as refused:
        refused.setattr(shutil, "rmtree", lambda path, **_: (remove(path), raise_busy()))
        look(restarts)
    told = capsys.readouterr().err
    assert "ended with exit code -9; its log cannot be read: [Errno 2]" in told
    assert "could not be started or stopped: [Errno 16]" in told
    assert not restarts.server.running
    look(restarts)
    assert restarts.server.running


def raise_busy() -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_server_over_two_nodes_starts_again_as_a_whole(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], killed: int
) -> None:
    """Whichever node's process ended, and if both have ended before either looks."""
    ended = tmp_path / "run/ended"
    ended.parent.mkdir()
    ended.write_bytes(b"....")  # of an earlier job
    nodes = [make("node0", ended), make("node1", ended)]
    first, other = nodes[killed], nodes[1 - killed]
    for restarts in nodes:
        look(restarts)
    kill(first)
    for restarts in (first, other):
        restarts.look()
    assert not any(restarts.server.running for restarts in nodes)
    told = capsys.readouterr().err
    assert told.count("ended with exit code -9") == 1
    assert told.count("ended on another of its nodes\nit starts again in 1 s") == 1
    for restarts in nodes:
        restarts.look()
        assert not restarts.server.running, "it is not due"
        look(restarts)
    assert [(restarts.launch, restarts.server.running) for restarts in nodes] == [(5, True)] * 2

    for restarts in nodes:
        kill(restarts)
    for _ in range(2):  # ends, and starts
        for restarts in nodes:
            look(restarts)
    assert [(restarts.launch, restarts.server.running) for restarts in nodes] == [(6, True)] * 2
    assert len(ended.read_bytes()) == 6


def test_an_end_is_told_to_the_other_nodes_before_a_server_starts_again(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = tmp_path / "run/ended"
    restarts = make("node0", ended)
    look(restarts)
    kill(restarts)
    ended.mkdir()  # cannot be written
    for pause in (2, 8):  # one for the end, and one for the failure to tell of it
        look(restarts)
        assert f"Is a directory: '{ended}'\nit starts again in {pause} s" in capsys.readouterr().err
    ended.rmdir()
    look(restarts)
    assert ended.exists() and not restarts.server.running
    look(restarts)
    assert restarts.launch == 1 and restarts.server.running

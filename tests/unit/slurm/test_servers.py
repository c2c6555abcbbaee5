"""The process that runs the servers of a rollout node."""

import os
from pathlib import Path

import pytest

from megavlm.inference.server import HOST, free_port
from megavlm.inference.server_process import ServerProcess
from megavlm.slurm.servers import Restarts

ROOT = Path(__file__).parents[3]


def test_a_server_that_cannot_be_launched_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that the machine refuses does not end the node's other servers."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stub = os.pathsep.join(map(str, [ROOT, ROOT / "tests/fakes/stub_sglang"]))
    environment = {**os.environ, "PYTHONPATH": stub, "STUB": "ok"}
    log = tmp_path / "run/server.log"
    log.mkdir(parents=True)  # cannot be opened
    restarts = Restarts(
        ServerProcess(HOST, free_port(), [], environment, ("a", "b"), log, stop_timeout=0)
    )
    for pause in (1, 2):
        restarts.due = 0.0
        restarts.look()
        told = capsys.readouterr().err
        assert "did not start: [Errno 21] Is a directory" in told
        assert f"it starts again in {pause} s\n" in told
        assert not restarts.server.running
        assert [path.name for path in tmp_path.iterdir()] == ["run"], "no temporary folder"
    restarts.look()
    assert capsys.readouterr().err == "", "it is not due"
    log.rmdir()
    restarts.due = 0.0
    try:
        restarts.look()
        assert restarts.server.running
    finally:
        restarts.server.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

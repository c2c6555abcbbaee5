"""Temporary folders of processes that were killed, and of those that live."""

import subprocess
import sys
from pathlib import Path

import pytest

from megavlm import temporary
from megavlm.temporary import temporary_folder

HOLDER = """
import sys, tempfile
from megavlm.temporary import temporary_folder

tempfile.tempdir = sys.argv[1]
with temporary_folder("megavlm-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_later_process_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "megavlm-tested").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        monkeypatch.setattr(temporary, "LEFT_FOR", -60.0)
        with temporary_folder("megavlm-test-"):
            assert (held / "file").exists(), "its process lives"
        holder.kill()
    monkeypatch.setattr(temporary, "LEFT_FOR", 60.0)
    with temporary_folder("megavlm-test-"):
        assert held.exists(), "it may not be locked yet"
    monkeypatch.setattr(temporary, "LEFT_FOR", -60.0)
    with temporary_folder("megavlm-test-") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, tmp_path / "megavlm-tested"])

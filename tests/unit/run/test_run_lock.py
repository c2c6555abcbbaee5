"""A run directory has one trainer."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.run.checks.run_lock import LOCK_FILE, check_free, run_lock

# Holds the lock, leaves a forked child that outlives it, and says when it is ready.
HOLDER = """
import os, sys, time
from megavlm.run.checks.run_lock import run_lock
with run_lock(sys.argv[1]):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # it has closed the lock by now
    time.sleep(600)
"""


def test_a_second_trainer_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """SIGKILL is enough, and what the dead run left does not stand in the way."""
    folder = tmp_path / "run"
    check_free(folder)
    assert not folder.exists(), "a check leaves nothing"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            for enter in (lambda: check_free(folder), run_lock(folder).__enter__):
                with pytest.raises(ValueError, match="is in use by") as refusal:
                    enter()
                assert re.fullmatch(
                    rf"run\.dir={folder} is in use by process {holder.pid} on "
                    rf"{re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d [0-9:+-]+: "
                    r"stop that run, or choose another run\.dir",
                    str(refusal.value),
                )
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # it lives, without the lock
            assert (folder / LOCK_FILE).read_text(), "stale words"
            check_free(folder)
            with run_lock(folder), pytest.raises(ValueError, match=f"process {os.getpid()} on"):
                check_free(folder)
            check_free(folder)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    for words in ("", "[]", "{}", "\0"):
        (tmp_path / LOCK_FILE).write_text(words)
        with (tmp_path / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ValueError, match="is in use by another process: stop that run"):
                check_free(tmp_path)


def test_without_locks_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / LOCK_FILE} cannot be locked on this file system: make sure that no other run "
        f"uses {tmp_path}."
    ]

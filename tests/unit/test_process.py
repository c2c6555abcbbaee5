"""How a process loads packages and ends."""

import os
import subprocess
import sys

import pytest

LIMITED = """
import resource
from megavlm.process import allow_open_files

most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
allow_open_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
CODE = """
import gc, sys
from megavlm.process import leave, loading_packages

with loading_packages():
    assert not gc.isenabled()
    import triton
assert gc.isenabled()
assert gc.get_freeze_count() > 10_000, "later collections leave packages out"

class Kept:
    def __del__(self):
        print("freed")

kept = Kept()
print("the last line", end="")
{end}
"""


# Triton's C++ code makes enumerations while it is imported.
STOPPED_IN_IMPORT = """
import enum, os, signal, sys
from megavlm.process import Stopped, stop_at_once, stop_deferred

def init(self, *arguments):
    if "triton" in sys.modules:
        enum.Enum.__init__ = made
        os.kill(os.getpid(), signal.SIGTERM)
    made(self, *arguments)

made, enum.Enum.__init__ = enum.Enum.__init__, init
stop_at_once()
try:
    with stop_deferred():
        import triton
        print("imported")
    print("not stopped")
except Stopped:
    assert enum.Enum.__init__ is made
    print("stopped")
"""


def test_a_request_to_stop_waits_for_the_end_of_an_import() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_IN_IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "imported\nstopped\n"), done.stderr


@pytest.mark.parametrize(
    ("end", "code", "output"),
    [("", 0, "the last linefreed\n"), ("leave(3)", 3, "the last line")],
    ids=["Python's", "at once"],
)
def test_loads_packages_and_ends(end: str, code: int, output: str) -> None:
    command = [sys.executable, "-c", CODE.format(end=end)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that output must be flushed
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (code, output), done.stderr
    assert done.stderr == "", "no leaks are reported"


def test_a_process_allows_itself_as_many_open_files_as_it_may() -> None:
    subprocess.run([sys.executable, "-c", LIMITED], check=True)

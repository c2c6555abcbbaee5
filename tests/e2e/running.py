"""A run in a process of its own, while a test does something to it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.conftest import WAIT
from tests.support.forked import forking


class Running:
    """A run that was started. output: what it prints, when it has ended."""

    def __init__(self, process: "subprocess.Popen[str]", metrics: Path) -> None:
        self.process, self.output = process, ""
        self._metrics = metrics
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        self.output, _ = self.process.communicate()

    def wait_until(self, fact: Callable[[], bool]) -> None:
        """Block until `fact` is true or the run ends; not longer than WAIT seconds."""
        deadline = time.monotonic() + WAIT
        while self.process.poll() is None and not fact():
            assert time.monotonic() < deadline, "what the test waits for does not come"
            time.sleep(0.02)

    def wait_for_steps(self, count: int) -> None:
        """Block until so many steps are recorded or the run ends."""
        path = self._metrics
        self.wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)

    def child(self, word: str) -> psutil.Process:
        """Return a process of the run whose command line has a word that ends with `word`. Its
        servers are forks of another process, and name the run's directory or a file beside it.
        """
        place = f"{self._metrics.parent.parent}/"
        of_run = psutil.Process(self.process.pid).children(recursive=True)
        for process in psutil.Process().children(recursive=True):
            try:
                words = process.cmdline()
                is_ours = process in of_run or any(place in argument for argument in words)
                if is_ours and any(argument.endswith(word) for argument in words):
                    return process
            except psutil.Error:
                pass
        raise AssertionError(f"no {word} among the processes of the run: {self.output}")

    def wait(self) -> int:
        """Return the exit code, when the run has ended."""
        self._reader.join(WAIT)
        assert not self._reader.is_alive(), f"the run did not end within {WAIT} s"
        return self.process.returncode


@contextmanager
def running(
    recipe: Path, run_dir: Path, *options: str, forks_servers: bool = True
) -> Iterator[Running]:
    """Start a run of the recipe, which is waited for at the end, and killed if the test fails.

    forks_servers: False if the test is about servers of ranks that die: only those executed are the
    run's own processes, whose end its launcher waits for.
    """
    with forking(servers=forks_servers):
        process = subprocess.Popen(
            [sys.executable, "-m", "megavlm", "train", str(recipe), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    with process:
        run = Running(process, run_dir / "metrics.jsonl")
        try:
            yield run
            run.wait()
        finally:
            process.kill()

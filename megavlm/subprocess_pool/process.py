"""Trainer's side of a process with limits: it sends requests, enforces their limits, and kills the
process with all its descendants.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from megavlm.subprocess_pool.failure import CallFailure
from megavlm.subprocess_pool.wire import Replies, frame

START_SECONDS = 120.0
MAX_OUTPUT = 2**20  # bytes that may be printed in one call
# Variables that the process inherits. The trainer's credentials are not among them.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
# The memory limit counts address space, of which each thread's arena would reserve 64 MB.
_SMALL = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class ChildProcess:
    """Process that runs a user's code. It is killed when the thread that started it ends, so this
    thread must live as long as the process is needed.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], *, what: str, memory_mb: int) -> None:
        """Start the process, without waiting for it.

        module: Module that the process runs, for example rewards/worker.py.
        setup: First message to the process; `setup` of the object adds the limits.
        what: Name of the process in errors.
        memory_mb: Limit of its memory in MiB.
        """
        self.control, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment | _SMALL,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self.output, self._what = self._process.stdout, what
        self.setup = {**setup, "memory_bytes": memory_mb * 2**20, "parent": os.getpid()}

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def check_start(self, reply: Mapping[str, Any]) -> None:
        """Raise ValueError if the first reply says that something cannot be loaded."""
        if "error" in reply:
            self.kill()
            raise ValueError(f"the {self._what} cannot be loaded: {reply['error']}")

    def start_error(self, failure: CallFailure, printed: bytes) -> ValueError:
        """Return the error of a process that did not start. printed: Its output."""
        text = shown(printed)
        return ValueError(f"the process for the {self._what} did not start ({failure}) {text}")

    def death(self) -> CallFailure:
        """Kill what is left of a process that ended by itself, and return the reason."""
        self.kill()
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return CallFailure("timeout", "out of processor time")
        return CallFailure("crash", f"its process ended with {code}")

    def kill(self) -> None:
        """Kill the process and all its descendants, also those in other process groups."""
        if not self.alive:
            return
        with suppress(psutil.NoSuchProcess):
            _kill_tree(psutil.Process(self._process.pid))
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.control.close()
        self.output.close()


class LimitedProcess(ChildProcess):
    """Process with limits that answers one request at a time."""

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        what: str,
        memory_mb: int,
        max_reply: int,
    ) -> None:
        """Start the process, and wait until it has loaded the user's code. max_reply: Limit of a
        reply in bytes. The other arguments are those of ChildProcess.

        Raises ValueError if the process does not start, or reports that something cannot be loaded.
        """
        super().__init__(module, setup, what=what, memory_mb=memory_mb)
        self._max_reply = max_reply
        self._printed = bytearray()
        try:
            self.reply = self._exchange(self.setup, START_SECONDS)
        except CallFailure as failure:
            raise self.start_error(failure, bytes(self._printed)) from failure
        self.check_start(self.reply)

    def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the reply, within `seconds`. Raises CallFailure; check `alive`
        before the next call.
        """
        reply = self._exchange({**request, "cpu_seconds": seconds}, seconds)
        if reply.get("left_children"):
            self.kill()
        if "failure" in reply:
            if reply["failure"] == "memory":  # the state of the process is unknown
                self.kill()
            raise CallFailure(reply["failure"], str(reply.get("message")))
        return reply

    def _exchange(self, message: Any, seconds: float) -> dict[str, Any]:
        """Send a message and return the reply. Every failure ends the process, but for a message
        that cannot be sent.
        """
        sent = frame(message)
        try:
            return self._wait(sent, time.monotonic() + seconds, seconds)
        except TimeoutError:
            self.kill()
            raise CallFailure("timeout", f"no answer in {seconds:g} s") from None
        except OSError:  # it died before it read the message
            raise self.death() from None
        except CallFailure:
            self.kill()
            raise

    def _wait(self, sent: bytes, deadline: float, seconds: float) -> dict[str, Any]:
        self.control.settimeout(seconds)
        self.control.sendall(sent)
        self._printed.clear()
        output = self.output.fileno()
        replies = Replies(self._max_reply)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in selector.select(left):
                    if key.fd == output:
                        if not (data := os.read(output, 2**16)):
                            selector.unregister(output)
                        self._count_output(data)
                        continue
                    if not (data := self.control.recv(2**16)):
                        raise self.death()
                    for reply in replies.add(data):
                        return reply

    def _count_output(self, data: bytes) -> None:
        self._printed += data
        if len(self._printed) > MAX_OUTPUT:
            raise CallFailure("output", f"more than {MAX_OUTPUT} bytes printed")


def _kill_tree(root: psutil.Process) -> None:
    """Kill a process tree. All processes are stopped first, so that none forks meanwhile."""
    stopped: dict[int, psutil.Process] = {}
    while True:
        found = [p for p in (root, *root.children(recursive=True)) if p.pid not in stopped]
        if not found:
            break
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
            stopped[process.pid] = process
    for process in reversed(stopped.values()):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def shown(printed: bytes) -> str:
    """Return the end of a process's output, for an error."""
    return printed.decode(errors="replace").strip()[-300:]

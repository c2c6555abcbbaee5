"""Trainer's side of a process with limits: it sends requests, enforces their limits, and kills the
process with all its descendants.
"""

import json
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

from megavlm.limited.failure import CallFailure
from megavlm.limited.wire import HEAD, frame

START_SECONDS = 120.0
MAX_OUTPUT = 2**20  # bytes that may be printed in one call
MAX_REPLY = 2**16
# Variables that the process inherits. The trainer's credentials are not among them.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")


class LimitedProcess:
    """Process with limits. It is killed when the thread that started it ends, so this thread must
    live as long as the process is needed.
    """

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        what: str,
        memory_mb: int,
        max_reply: int = MAX_REPLY,
    ) -> None:
        """Start the process.

        module: Module that the process runs, for example rewards/worker.py.
        setup: First message to the process.
        what: Name of the process in errors.
        memory_mb: Limit of its memory in MiB.
        max_reply: Limit of a reply in bytes.

        Raises ValueError if the process does not start, or reports that something cannot be loaded.
        """
        ours, theirs = socket.socketpair()
        self._control, self._max_reply = ours, max_reply
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._printed = bytearray()
        limits = {"memory_bytes": memory_mb * 2**20, "parent": os.getpid()}
        try:
            self.reply = self._exchange({**setup, **limits}, START_SECONDS)
        except CallFailure as failure:
            printed = self._printed.decode(errors="replace").strip()[-300:]
            raise ValueError(
                f"the process for the {what} did not start ({failure}) {printed}"
            ) from failure
        if "error" in self.reply:
            self.kill()
            raise ValueError(f"the {what} cannot be loaded: {self.reply['error']}")

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

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def _exchange(self, message: Any, seconds: float) -> dict[str, Any]:
        """Send a message and return the reply. Every failure ends the process."""
        try:
            return self._wait(message, time.monotonic() + seconds, seconds)
        except TimeoutError:
            self.kill()
            raise CallFailure("timeout", f"no answer in {seconds:g} s") from None
        except OSError:  # it died before it read the message
            raise self._death() from None
        except CallFailure:
            self.kill()
            raise

    def _wait(self, message: Any, deadline: float, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        self._control.sendall(frame(message))
        self._printed.clear()
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
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
                    if not (data := self._control.recv(2**16)):
                        raise self._death()
                    reply += data
                    if (whole := _parse(reply, self._max_reply)) is not None:
                        return whole

    def _count_output(self, data: bytes) -> None:
        self._printed += data
        if len(self._printed) > MAX_OUTPUT:
            raise CallFailure("output", f"more than {MAX_OUTPUT} bytes printed")

    def _death(self) -> CallFailure:
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
        self._control.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


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


def _parse(reply: bytearray, max_reply: int) -> dict[str, Any] | None:
    """Return the reply, or None if it is not complete yet."""
    if len(reply) < HEAD.size:
        return None
    size = HEAD.unpack_from(reply)[0]
    if size > max_reply:
        raise CallFailure("value", f"a reply of {size} bytes")
    if len(reply) < HEAD.size + size:
        return None
    try:
        value = json.loads(reply[HEAD.size :])
    except ValueError as error:
        raise CallFailure("value", "a reply that is not JSON") from error
    if not isinstance(value, dict):
        raise CallFailure("value", "a reply that is not an object")
    return value

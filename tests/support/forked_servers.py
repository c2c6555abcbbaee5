"""SGLang servers forked from a process that has imported SGLang (`sglang_forks.py`).

A server that is executed imports SGLang for five to nine seconds of CPU time. Within
`forking_servers`, the Popen of a server asks that process for a fork, in this process and in its
forks. The fork has the arguments, environment, streams, session and exit code of a server that is
executed, but it is a child of another process.
"""

import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megavlm import sglang_cpu
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_process import SERVER_MAIN
from tests.support.servers import run_server

FORKED = Path(__file__).with_name("sglang_forks.py")
TESTS = Path(__file__).parents[1]
# Servers, and programs of tests that use SGLang's code as it is in a server.
PROGRAMS = [
    [str(SERVER_MAIN)],
    [str(TESTS / "sglang/caches.py")],
    [str(TESTS / "sglang/towers.py")],
    [str(TESTS / "gpu_path/sglang_receiver.py")],
]
_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@contextmanager
def forking_servers() -> Iterator[None]:
    """Fork servers instead of executing them, in this process and in its forks."""
    _start()
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def fork_or_execute(popen: Any, args: Any, *rest: Any) -> None:
        """Stand in for Popen's method of the same arguments."""
        if args[0] == sys.executable and args[2:3] in PROGRAMS:
            _fork(popen, args, *rest)
        else:
            execute(popen, args, *rest)

    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


@contextmanager
def forked(server: ManagedServer) -> Iterator[ManagedServer]:
    """Run a server within the context; it is forked."""
    with ExitStack() as stack:
        with forking_servers():
            stack.enter_context(run_server(server))
        yield server


@functools.cache
def _start() -> tuple[str | bytes, "subprocess.Popen[bytes]"]:
    """Start the process that is forked. Return the address of its socket, and the process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-P", FORKED, str(os.getpid()), str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env=os.environ
            | sglang_cpu.variables("", 1, 0)
            | ServerOptions("", "float32", "cpu").variables(),
        )
        return listener.getsockname(), process


def execution(*args: Any) -> SimpleNamespace:
    """Return the arguments of a call of `Popen._execute_child`, by name."""
    return SimpleNamespace(**_PARAMETERS.bind(*args).arguments)


def keep_own_ends(call: SimpleNamespace) -> None:
    """Close the child's ends of the pipes in this process, as `_execute_child` does at its end."""
    call.self._child_created = True
    call.self._close_pipe_fds(
        call.p2cread, call.p2cwrite, call.c2pread, call.c2pwrite, call.errread, call.errwrite
    )


def _fork(*args: Any) -> None:
    call = execution(*args)
    popen = call.self
    address, _ = _start()
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(address)
    request = {"words": call.args, "environment": dict(call.env), "folder": os.getcwd()}
    streams = [
        number if stream == -1 else stream
        for number, stream in enumerate((call.p2cread, call.c2pwrite, call.errwrite))
    ]
    socket.send_fds(asked, [json.dumps(request).encode()], streams)
    popen.pid = int(asked.recv(32))
    keep_own_ends(call)

    def wait(pid: int, flags: int) -> tuple[int, int]:
        """Stand in for os.waitpid, because the server is another process's child."""
        if flags & os.WNOHANG and not select.select([asked], [], [], 0)[0]:
            return 0, 0
        with asked:
            return pid, int(asked.recv(32) or signal.SIGKILL)  # it has ended with its parent

    popen._try_wait = functools.partial(wait, popen.pid)
    popen._internal_poll = functools.partial(popen._internal_poll, _waitpid=wait)

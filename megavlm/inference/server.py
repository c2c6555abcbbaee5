"""SGLang server process as a context manager: no process of it outlives the context."""

import json
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_args import ServerArgs, ServerOptions, command_line
from megavlm.inference.server_main import SHARED_MEMORY, remove, shared_memory_of

HOST = "127.0.0.1"
SERVER_MAIN = Path(__file__).resolve().with_name("server_main.py")
# Seconds to end after SIGTERM. A GPU's memory may stay taken when a server is killed while it
# releases it; on a CPU there is nothing to release, and SGLang would take 9 s.
STOP_TIMEOUT = {"cuda": 30.0, "cpu": 0.0}
TAIL_LINES, TAIL_BYTES = 30, 2**16
LEFT_FOR = 3600.0  # seconds
LOG_BYTES, LOG_KEPT = 32 * 2**20, 2
KERNEL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SERVER_PORTS = range(20000, 22000)  # SGLang 0.5.23 looks for ports of its own from 22000 on


class ManagedServer:
    """SGLang server on this machine, with random keys, as long as the context.

    Entering returns once the server answers; `launch` returns at once and may follow a `stop`.
    Leaving stops all its processes: SIGTERM, a deadline, then SIGKILL to its process group. If
    this process dies in any other way, the kernel ends the server (see server_main.py). For the
    kernel, the parent is the thread that launched it: use a thread that lives as long.

    log_path: output of the server; the first launch overwrites an existing file, and a file of
    LOG_BYTES becomes its first of LOG_KEPT older ones (`rotate_log`). port: None takes
    one that stays free, see `server_ports`. first_gpu: its ranks take GPUs from this one on.
    first_core: on a CPU, its ranks are bound to cores from this one on. start_timeout: seconds to
    become healthy.

    Raises RolloutServerError if the port is in use or the server does not become healthy.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        log_path: str | Path,
        port: int | None = None,
        first_gpu: int = 0,
        first_core: int = 0,
        start_timeout: float = 300.0,
    ) -> None:
        self.port = server_ports(1)[0] if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        # hex: a key that starts with "-" would read as an option
        self.api_key, self.admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self.log_path = Path(log_path)
        self.start_timeout = start_timeout
        self.tensor_parallel, self.device = options.tensor_parallel, options.device
        self._environment = options.environment(first_core)
        gpu: ServerArgs = {} if options.device == "cpu" else {"base_gpu_id": first_gpu}
        address: ServerArgs = {"host": HOST, "port": self.port}
        self._arguments = command_line({**address, **gpu, **options.arguments()})
        self._log_mode = "wb"
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "ManagedServer":
        self.launch()
        with ExitStack() as stack:
            stack.callback(self.stop)  # on Ctrl-C, too: no process may be left
            self._wait_until_healthy(time.monotonic() + self.start_timeout)
            stack.pop_all()
        return self

    def launch(self) -> None:
        """Start the processes. Raises RolloutServerError if the port is in use."""
        assert self._process is None, "it is running"
        require_free(self.port)
        remove_leftovers()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.TemporaryDirectory(prefix="megavlm-rollout-")
        command = [sys.executable, "-P", str(SERVER_MAIN), str(os.getpid())]
        open(self.log_path, self._log_mode).close()
        with open(self.log_path, "ab") as log:  # appending, or a rotation would leave a gap
            self._process = subprocess.Popen(
                command + self._arguments,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment | {"TMPDIR": self._temporary.name},  # SGLang leaves sockets
                start_new_session=True,  # its own process group, out of Ctrl-C's reach
            )
        self._log_mode = "ab"  # a restart keeps the log of the process that died
        with ExitStack() as stack:
            stack.callback(self.stop)
            self._send_keys(self._process)
            stack.pop_all()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise RolloutServerError with the end of the log if the server has died."""
        if (reason := self.death()) is not None:
            raise RolloutServerError(reason)

    def death(self) -> str | None:
        """Return why the server died, with the end of its log; None while it runs."""
        assert self._process is not None, "the server was not started"
        if (code := self._process.poll()) is None:
            return None
        return self.with_log(f"the SGLang server on port {self.port} ended with exit code {code}")

    @property
    def running(self) -> bool:
        """Return True from `launch` to `stop`, even if the server has died."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Return the id of the server's first process; None if it was not launched."""
        return None if self._process is None else self._process.pid

    def abort(self) -> None:
        """End the server's processes by SIGABRT, upon which they write their stacks to the log."""
        if self._process is None:
            return
        for process in _family(self._process.pid):
            try:
                # A core file of a GPU server has tens of gigabytes.
                process.rlimit(resource.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)
            except psutil.NoSuchProcess:
                pass

    def rotate_log(self) -> None:
        """Copy a log of LOG_BYTES to LOG.1, the one there to LOG.2, and go on with an empty file:
        the server's processes keep theirs open. Lines that they write meanwhile are lost; on a full
        disk, those that cannot be copied too.
        """
        older = [self.log_path.with_name(f"{self.log_path.name}.{n}") for n in (1, LOG_KEPT)]
        with suppress(OSError):
            if self.log_path.stat().st_size < LOG_BYTES:
                return
            try:
                if older[0].exists():
                    older[0].replace(older[1])
                shutil.copyfile(self.log_path, older[0])
            finally:
                os.truncate(self.log_path, 0)

    def stop(self) -> None:
        """End the server and all its workers. Does nothing if it is stopped already."""
        process, self._process = self._process, None
        if process is None:
            return
        files = shared_memory_of(process.pid)
        try:
            process.terminate()
            process.wait(STOP_TIMEOUT[self.device])
        except subprocess.TimeoutExpired:
            pass  # it may ignore SIGTERM while a request hangs
        finally:  # after a second Ctrl-C, too
            _kill_group(process.pid)
            process.wait()
            remove(files)
            assert self._temporary is not None
            self._temporary.cleanup()

    def _send_keys(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_key}
        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(keys).encode() + b"\n")
        except BrokenPipeError:
            pass  # it is dead already, and the wait reports it with the end of the log

    def _wait_until_healthy(self, deadline: float) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=5.0) as client:
            while time.monotonic() < deadline:
                self.check()
                try:
                    # /health is open to all; /model_info proves that it is our server that answers.
                    if all(client.get(path).is_success for path in ("/health", "/model_info")):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        raise RolloutServerError(self.with_log(self.too_late))

    @property
    def too_late(self) -> str:
        return (
            f"the SGLang server on port {self.port} was not healthy after {self.start_timeout:g} s "
            "(rollout.start_timeout)"
        )

    def with_log(self, message: str) -> str:
        """Return the message with the end of the server's log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"  {line[:500]}" for line in lines)
        return f"{message}; the end of {self.log_path}:\n{tail}"


def remove_leftovers() -> None:
    """Remove this user's files of SGLang in shared memory that no process has mapped any more, of
    runs that were killed as a whole. Those of the last hour stay: a process may be about to map
    them, or be in another container.
    """
    old = {
        str(path)
        for path in Path(SHARED_MEMORY).parent.glob(f"{Path(SHARED_MEMORY).name}*")
        if (stat := path.lstat()).st_uid == os.getuid() and time.time() - stat.st_ctime > LEFT_FOR
    }
    if old:
        remove(old - shared_memory_of(None))


def _family(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, the youngest first, and itself."""
    try:
        root = psutil.Process(pid)
        return [*reversed(root.children(recursive=True)), root]
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    """Return a TCP port that nothing on this machine listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def server_ports(count: int) -> list[int]:
    """Return different free ports.

    They are below the range from which the kernel picks ports, so that they stay free until the
    servers listen, and across restarts. If too few of those are free, the kernel picks.
    """
    kernels = int(KERNEL_PORT_RANGE.read_text().split()[0])
    below = [port for port in SERVER_PORTS if port < kernels]
    found: list[int] = []
    for port in random.SystemRandom().sample(below, len(below)):  # no seed: runs must differ
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    return found + [free_port() for _ in range(count - len(found))]


def _is_free(port: int) -> bool:
    try:
        require_free(port)
    except RolloutServerError:
        return False
    return True


def require_free(port: int) -> None:
    """Raise RolloutServerError if something listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no listener
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RolloutServerError(
                f"port {port}, of a rollout server, is in use on this machine ({error.strerror}); "
                "stop what listens there, or choose another by rollout.port (null: a free one)."
            ) from error


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all gone

"""One SGLang server as a context manager: started, watched, and never left behind."""

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_args import ServerArgs, arguments, environment, serving_args

HOST = "127.0.0.1"
HERE = Path(__file__).resolve().parent
# Seconds to obey SIGTERM. A GPU's memory may stay taken when a server is killed while it releases
# it; on a CPU there is nothing to release, and SGLang would take 9 s.
STOP_TIMEOUT = {"cuda": 30.0, "cpu": 0.0}
TAIL_LINES = 30
KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS = range(20000, 22000)  # SGLang 0.5.23 looks for ports of its own from 22000 on


class ManagedServer:
    """SGLang serving `model_folder` on this machine, with random keys, for as long as the context.

    Entering returns once the server answers; `launch` returns at once and may follow a `stop`.
    Leaving stops every process of it: SIGTERM, a deadline, then SIGKILL to its process group. If
    this process dies in any other way, the kernel ends the server (see server_main.py); launch it
    on a thread that lives as long as it, since for the kernel the parent is that thread.

    dtype: "float32", "bfloat16", ... device: "cpu" or "cuda".
    port: None takes one that is free and stays so, see `server_ports`. log_path: output of the
    server; an existing file is overwritten by the first launch. first_gpu: its ranks take GPUs from
    this one on. first_core: on a CPU its ranks, if it has several, are bound to cores from this one
    on, in turn.
    start_timeout: seconds to become healthy. cache_images: keep the tower's features of images
    across requests; False where training changes the tower, because SGLang never drops them when
    weights change. server_args: further SGLang arguments, by their names in Python; None drops
    a default of ours.

    Raises ValueError for arguments that are not allowed, RolloutServerError when the port is in use
    or the server does not become healthy.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: str,
        device: str,
        tensor_parallel: int = 1,
        port: int | None = None,
        log_path: str | Path,
        first_gpu: int = 0,
        first_core: int = 0,
        start_timeout: float = 300.0,
        cache_images: bool = True,
        server_args: ServerArgs | None = None,
    ) -> None:
        self.port = server_ports(1)[0] if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        # hex: a key that starts with "-" would read as an option
        self.api_key, self.admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self.log_path = Path(log_path)
        self.start_timeout = start_timeout
        self.tensor_parallel, self.device = tensor_parallel, device
        self._stop_timeout = STOP_TIMEOUT[device]
        self._environment = environment(device, tensor_parallel, cache_images, first_core)
        place: ServerArgs = {} if device == "cpu" else {"base_gpu_id": first_gpu}
        served = serving_args(model_folder, dtype, device, tensor_parallel, server_args or {})
        self._arguments = arguments({"host": HOST, "port": self.port, **place, **served})
        self._log_mode = "wb"
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "ManagedServer":
        self.launch()
        try:
            self._wait_until_healthy(time.monotonic() + self.start_timeout)
        except BaseException:  # KeyboardInterrupt too: nothing may stay behind
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Starts the processes; RolloutServerError when the port is in use."""
        assert self._process is None, "it is running"
        require_free(self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.TemporaryDirectory(prefix="megavlm-rollout-")
        command = [sys.executable, "-P", str(HERE / "server_main.py"), str(os.getpid())]
        with open(self.log_path, self._log_mode) as log:
            self._process = subprocess.Popen(
                command + self._arguments,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment | {"TMPDIR": self._temporary.name},  # SGLang leaves sockets
                start_new_session=True,  # its own process group, out of Ctrl-C's reach
            )
        self._log_mode = "ab"  # why the last one died stays readable
        try:
            self._send_keys(self._process)
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def check(self) -> None:
        """RolloutServerError with the log's tail if the server has died."""
        if (reason := self.death()) is not None:
            raise RolloutServerError(reason)

    def death(self) -> str | None:
        """How it died, with the log's tail; None while it runs."""
        assert self._process is not None, "the server was not started"
        if (code := self._process.poll()) is None:
            return None
        return self.with_log(f"the SGLang server on port {self.port} ended with exit code {code}")

    @property
    def running(self) -> bool:
        """Whether it was launched and not stopped since; it may have died."""
        return self._process is not None

    def stop(self) -> None:
        """Ends the server and all its workers. Does nothing when it is stopped already."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            pass  # it may ignore SIGTERM while a request hangs
        finally:  # a second Ctrl-C comes here too
            _kill_group(process.pid)
            process.wait()
            assert self._temporary is not None
            self._temporary.cleanup()

    def _send_keys(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_key}
        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(keys).encode() + b"\n")
        except BrokenPipeError:
            pass  # it is dead already, and the wait says so with the log's tail

    def _wait_until_healthy(self, deadline: float) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=5.0) as client:
            while time.monotonic() < deadline:
                self.check()
                try:
                    # /health is open to all: /model_info proves that it is our server that answers.
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
        """The message, and the end of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"  {line[:500]}" for line in lines)
        return f"{message}; the end of {self.log_path}:\n{tail}"


def free_port() -> int:
    """A TCP port that nothing on this machine listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def server_ports(count: int) -> list[int]:
    """Different ports that are free. They are below those that the kernel gives to whoever asks for
    any, so that they stay free until servers listen, and while one is started anew; where too few
    of those are free, they are the kernel's.
    """
    kernels = int(KERNELS_PORTS.read_text().split()[0])
    below = [port for port in PORTS if port < kernels]
    found: list[int] = []
    for port in random.SystemRandom().sample(below, len(below)):  # seeds make no two runs meet
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
    """RolloutServerError if something listens on `port`."""
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

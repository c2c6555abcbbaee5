"""The processes of one SGLang server on this machine, and their log."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from megavlm.inference.server_main import SHARED_MEMORY, remove, shared_memory_of
from megavlm.temporary import temporary_folder

# Environment variables with the keys of servers that were started elsewhere. Keys are never in a
# recipe, because it is written to the run directory.
API_KEY, ADMIN_KEY = "MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY"
SERVER_MAIN = Path(__file__).resolve().with_name("server_main.py")
TAIL_LINES, TAIL_BYTES = 30, 2**16
LEFT_FOR = 3600.0  # seconds before a leftover file is removed
LOG_BYTES, LOG_KEPT = 32 * 2**20, 2


class ServerProcess:
    """The processes of an SGLang server, from `launch` to `stop`. After `stop` it can be launched
    again.

    `stop` ends all processes: SIGTERM, a deadline, then SIGKILL to their process group. If this
    process dies without it, the kernel ends the server (see server_main.py). To the kernel, the
    parent of a server is the thread that launched it, so launch it from a thread that lives as long
    as the server.

    host, port: Address on which the server listens. arguments: Further command-line arguments of
    SGLang. keys: API key and admin API key. log_path: File to which the server's output is
    appended; `rotate_log` keeps LOG_KEPT older files of LOG_BYTES. stop_timeout: Seconds to end
    after SIGTERM.
    """

    def __init__(
        self,
        host: str,
        port: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keys: tuple[str, str],
        log_path: str | Path,
        stop_timeout: float,
    ) -> None:
        self.host, self.port = host, port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.api_key, self.admin_key = keys
        self.log_path = Path(log_path)
        self._arguments = ["--host", host, "--port", str(port), *arguments]
        self._environment = dict(environment)
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary = ExitStack()

    def launch(self) -> None:
        """Start the processes."""
        assert self._process is None, "it is running"
        remove_leftovers()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        folder = self._temporary.enter_context(temporary_folder("megavlm-rollout-"))
        # -P keeps this folder off sys.path, where its requests.py would shadow the package
        # requests.
        command = [sys.executable, "-P", str(SERVER_MAIN), str(os.getpid())]
        with ExitStack() as stack:
            stack.callback(self._temporary.close)
            with open(self.log_path, "ab") as log:  # append, or a rotation leaves a gap
                self._process = subprocess.Popen(
                    command + self._arguments,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment | {"TMPDIR": str(folder)},  # for its sockets
                    start_new_session=True,  # its own process group, which Ctrl-C does not reach
                )
            stack.callback(self.stop)
            self._send_keys(self._process)
            stack.pop_all()

    def death(self) -> str | None:
        """Return why the server died, with the end of its log. Returns None while it runs."""
        assert self._process is not None, "the server was not started"
        if (code := self._process.poll()) is None:
            return None
        return self.with_log(f"the SGLang server on port {self.port} ended with exit code {code}")

    @property
    def running(self) -> bool:
        """Return True from `launch` to `stop`, even if the server has died."""
        return self._process is not None

    @property
    def listens(self) -> bool:
        """Return True if one of the server's processes listens at its port. Until then, another
        program there may be another user's, who must not get the keys.
        """
        for process in self._family():
            with suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    is_open = connection.status == psutil.CONN_LISTEN
                    if is_open and connection.laddr.port == self.port:
                        return True
        return False

    @property
    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of the server's processes; None if it was not launched."""
        return None if self._process is None else sum(map(_cpu_seconds, self._family()))

    def suspend(self) -> None:
        """Suspend the server's processes. `abort` or `stop` can still end them."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def abort(self) -> None:
        """End the server's processes by SIGABRT, so that they write their stack traces to the
        log.
        """
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                # Write no core file: a GPU server's has tens of gigabytes.
                process.rlimit(resource.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)
                process.resume()

    def rotate_log(self) -> None:
        """Rotate a log that has reached LOG_BYTES: LOG.1 becomes LOG.2, the log is copied to LOG.1
        and then emptied. It is copied and not renamed, because the server's processes keep it open.
        Lines written meanwhile are lost and, on a full disk, lines that cannot be copied.
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
        """End the server and all its workers. Does nothing if it is already stopped."""
        process, self._process = self._process, None
        if process is None:
            return
        files: set[str] = set()
        try:
            files = shared_memory_of(process.pid)
            process.terminate()
            process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            pass  # it may ignore SIGTERM while a request hangs
        finally:  # also after a second Ctrl-C
            _kill_group(process.pid)
            process.wait()
            remove(files)
            self._temporary.close()

    def with_log(self, message: str) -> str:
        return with_log(message, self.log_path)

    def _family(self) -> list[psutil.Process]:
        """Return the descendants of the server's first process, the youngest first, and the process
        itself last.
        """
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                first = psutil.Process(self._process.pid)
                return [*reversed(first.children(recursive=True)), first]
        return []

    def _send_keys(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_key}
        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(keys).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has already died; the next check reports it with the log


def with_log(message: str, path: Path) -> str:
    """Return a message followed by the end of a server's log, or by why the log cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError as error:
        return f"{message}; its log cannot be read: {error}"
    tail = "\n".join(f"  {line[:500]}" for line in lines)
    full = "" if shutil.disk_usage(path.parent).free else ", whose disk is full"
    return f"{message}; the end of {path}{full}:\n{tail}"


def remove_leftovers() -> None:
    """Remove this user's SGLang files in shared memory that no process maps any more, left by runs
    that were killed as a whole. Files of the last hour are kept, because a process may be about to
    map them, or may be in another container.
    """
    old = set()
    for path in Path(SHARED_MEMORY).parent.glob(f"{Path(SHARED_MEMORY).name}*"):
        with suppress(FileNotFoundError):  # another server has removed it meanwhile
            stat = path.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_ctime > LEFT_FOR:
                old.add(str(path))
    if old:
        remove(old - shared_memory_of(None))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all gone

"""The life of a server's processes, with a stub in SGLang's place that starts in a moment."""

import asyncio
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.inference import server as server_module
from megavlm.inference import server_process
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ManagedServer, free_port
from megavlm.inference.server_args import ServerOptions, command_line
from megavlm.inference.server_main import LOOK_EVERY, SHARED_MEMORY, shared_memory_of
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import Probes, Unreachable
from tests.support.servers import run_server
from tests.support.timeouts import scaled

ROOT = Path(__file__).resolve().parents[3]
STUB = ROOT / "tests" / "fakes" / "stub_sglang"


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("STUB", "ok")


def managed(tmp_path: Path, **options: Any) -> ManagedServer:
    log = tmp_path / "logs" / "server.log"
    return ManagedServer(
        ServerOptions("model", dtype="float32", device="cpu"), log_path=log, **options
    )


def worker(log: str) -> psutil.Process | None:
    """Return the stub's worker process, found in its log; None if it has ended."""
    match = re.search(r"^worker (\d+)$", log, re.MULTILINE)
    assert match
    try:
        return psutil.Process(int(match[1]))
    except psutil.NoSuchProcess:
        return None


def assert_gone(log: str) -> None:
    process = worker(log)
    if process is not None:
        process.wait(scaled(180))


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "stubborn")
    before = set(descendants())
    with run_server(managed(tmp_path)) as server:
        started = set(descendants()) - before
        assert len(started) == 3  # the server, its reaper, its worker
        temporary = Path(psutil.Process(server._process.pid).environ()["TMPDIR"])
        assert temporary.is_dir()
        assert "pointers by megavlm_images" in server.log_path.read_text()
    _, alive = psutil.wait_procs(started, timeout=scaled(180))
    assert not alive and not temporary.exists()
    server.stop()  # a second time does nothing


def test_keys_are_in_no_list_environment_or_log(tmp_path: Path) -> None:
    with run_server(managed(tmp_path)) as server:
        started = descendants()
        for process in started:
            seen = " ".join([*process.cmdline(), *process.environ().values()])
            assert server.api_key not in seen and server.admin_key not in seen
    log = server.log_path.read_text()
    assert "'api_key': '***', 'admin_api_key': '***'" in log
    assert "keys in the environment: False" in log
    assert server.api_key not in log and server.admin_key not in log
    assert server.api_key != server.admin_key and len(server.api_key) > 40


def test_another_program_at_the_port_gets_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the port after that was claimed, and answers as a server would."""
    monkeypatch.setenv("STUB", "silent")
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    server = managed(tmp_path)
    server.launch()
    other = ThreadingHTTPServer(("127.0.0.1", server.port), Answer)
    threading.Thread(target=other.serve_forever, args=(0.01,)).start()
    try:
        with pytest.raises(Unreachable, match="no process of the server listens at"):
            asyncio.run(Probes().check_started(ServerHandle.managed(server), resume=False))
        assert asked == []
    finally:
        other.shutdown()
        other.server_close()
        server.stop()


def test_ports_of_ours_are_none_that_the_kernel_gives_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server listens 20 s after it was launched, and may restart days later."""
    first = int(server_module.KERNEL_PORT_RANGE.read_text().split()[0])
    assert first <= free_port()
    (tmp_path / "range").write_text("20400\t60999\n")
    monkeypatch.setattr(server_module, "KERNEL_PORT_RANGE", tmp_path / "range")
    claims = [server_module.ClaimedPort() for _ in range(300)]
    ports = [claim.number for claim in claims]
    assert len(set(ports)) == 300 and max(ports) < 20400
    assert managed(tmp_path).port < 20400


def test_a_port_of_ours_that_another_program_has_taken(tmp_path: Path) -> None:
    server = managed(tmp_path)
    with socket.socket() as taken:
        # Connections of a server that had the port before may be left in TIME_WAIT.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", server.port))
        taken.listen()
        with pytest.raises(RolloutServerError, match=rf"port {server.port}, .* is in use"):
            server.launch()
    with run_server(server):
        assert server.death() is None, "the pool tries again"


def test_where_no_port_is_below_the_kernels() -> None:
    claims = [server_module.ClaimedPort(range(0)) for _ in range(2)]
    assert 0 < claims[0].number != claims[1].number > 0


def test_two_runs_that_start_at_once_have_different_ports(tmp_path: Path) -> None:
    """From the choice of a port to the end of its server's object, whether or not one listens."""
    ours = managed(tmp_path)
    program = "from megavlm.inference.server import ClaimedPort; "
    program += f"print(ClaimedPort([{ours.port}]).number)"

    def chosen_by_another() -> int:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return int(subprocess.check_output([sys.executable, "-c", program], env=environment))

    assert chosen_by_another() != ours.port != server_module.ClaimedPort([ours.port]).number
    with run_server(ours):
        pass
    assert chosen_by_another() != (port := ours.port)
    del ours
    assert server_module.ClaimedPort([port]).number == port


PARENT = """
import sys
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from tests.support.servers import run_server
options = ServerOptions("model", dtype="float32", device="cpu")
with run_server(ManagedServer(options, log_path=sys.argv[1])):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_parent_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Another program, which holds a server."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{STUB}"}
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        started = psutil.Process(parent.pid).children(recursive=True)
        temporary = Path(started[0].environ()["TMPDIR"])
        assert len(started) == 3 and temporary.is_dir()
        parent.kill()
    _, alive = psutil.wait_procs(started, timeout=scaled(180))
    assert not alive and not temporary.exists()


def test_command_line() -> None:
    words = command_line(
        {"tp_size": 2, "sleep_on_idle": True, "disable_radix_cache": False, "x": None}
    )
    assert words == ["--tp-size", "2", "--sleep-on-idle"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    cpu = ServerOptions("model", "float32", "cpu", tensor_parallel=2).environment()
    assert "RANK" not in cpu and "LOCAL_RANK" not in cpu and "TORCHELASTIC_RUN_ID" not in cpu
    assert cpu["KEPT"] == "1" and cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert len(cpu["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert cpu["PYTHONPATH"].split(os.pathsep)[0].endswith("sglang_cpu")
    assert cpu["MEGAVLM_SERVED_MODULES"] == ""  # there is no model in the folder
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in cpu
    cuda = ServerOptions("model", "bfloat16", "cuda", cache_images=False).environment()
    assert "SGLANG_USE_CPU_ENGINE" not in cuda and "sglang_cpu" not in cuda["PYTHONPATH"]
    assert cuda["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    cuda = ServerOptions("model", "bfloat16", "cuda").environment()
    assert cuda["SGLANG_VLM_CACHE_SIZE_MB"] == "512", "also for Qwen3-VL on Hopper"


def test_the_log_rotates_and_its_end_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "LOG_BYTES", 1000)
    with run_server(managed(tmp_path)) as server:
        for number in range(5):
            with server.log_path.open("ab") as log:
                log.write(b"x" * 1000 + f"\n{number}".encode())
            server.rotate_log()
            assert server.log_path.stat().st_size == 0
        server.rotate_log()  # an empty one stays
        server.abort()  # it writes its stacks to the file it has open
        wait_until(lambda: "most recent call first" in server.log_path.read_text())
        assert b"\0" not in server.log_path.read_bytes(), "no gap"
    kept = sorted(path.name for path in server.log_path.parent.iterdir())
    assert kept == ["server.log", "server.log.1", "server.log.2"]
    assert server.log_path.with_name("server.log.1").read_text().endswith("\n4")
    with server.log_path.open("ab") as log:
        log.write(b"old\n" * 10**5 + b"the last words\n")
    assert server.with_log("it died").endswith("the last words")
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "server.log, whose disk is full:" in server.with_log("it died")


def test_shared_memory_of_killed_servers_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server's own processes when it ends; of dead processes when one starts."""
    begin = f"{SHARED_MEMORY}_shm_test{os.getpid()}"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = ("left", f"{ended.pid}_0", "young", "held", f"{os.getpid()}_0")
    left, dead, young, held, made = (Path(f"{begin}_{name}") for name in names)
    monkeypatch.setattr(server_process, "LEFT_FOR", 0.0)
    monkeypatch.setattr(server_process, "SHARED_MEMORY", begin)
    try:
        for path in (left, dead, made):
            path.touch()
        held.write_bytes(b"x" * 4096)
        with held.open("r+b") as file, mmap.mmap(file.fileno(), 0), run_server(managed(tmp_path)):
            assert not left.exists() and not dead.exists(), "nobody has them"
            assert held.exists() and made.exists(), "this process has them"
            assert str(held) in shared_memory_of(os.getpgid(0))
        monkeypatch.setattr(server_process, "LEFT_FOR", 3600.0)
        young.touch()
        server_process.remove_leftovers()
        assert young.exists()
    finally:
        for path in (left, dead, young, held, made):
            path.unlink(missing_ok=True)


def test_shared_memory_that_another_server_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, gone = tmp_path / "left", tmp_path / "gone"
    left.touch()
    monkeypatch.setattr(server_process, "LEFT_FOR", -60.0)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone, left]))
    server_process.remove_leftovers()
    assert not left.exists()


@pytest.mark.parametrize(
    "killed", ["nobody", "first", pytest.param("workers", marks=pytest.mark.slow)]
)
def test_a_server_that_ends_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """SGLang's workers may end before its first process: nobody maps their files then."""
    monkeypatch.setenv("STUB", "shared memory")
    with run_server(managed(tmp_path)) as server:
        paths = [Path(file) for file in shared_memory_of(server._process.pid)]
        assert len(paths) == 2 and all(path.exists() for path in paths)
        if killed == "workers":
            time.sleep(LOOK_EVERY + scaled(0.5))
            for child in psutil.Process(server._process.pid).children():
                if "-c" in child.cmdline():
                    child.kill()
        if killed != "nobody":
            os.kill(server._process.pid, signal.SIGKILL)  # its reaper does the rest
            wait_until(lambda: not any(path.exists() for path in paths))
            assert_gone(server.log_path.read_text())
    assert not any(path.exists() for path in paths)


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(120)
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)

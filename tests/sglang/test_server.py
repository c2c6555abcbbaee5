"""The real server's processes, where the stub of the unit tests cannot speak for SGLang."""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.probes import Probes
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.server_api import Servers, control_client
from tests.sglang.conftest import Served
from tests.sglang.questions import prompts
from tests.support.forked_servers import forking_servers
from tests.support.generation import generate
from tests.support.servers import run_server
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import sys
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
options = ServerOptions(sys.argv[1], dtype="float32", device="cpu")
ManagedServer(options, log_path=sys.argv[2]).launch()
sys.stdin.read()
"""


def group(server: ManagedServer) -> list[psutil.Process]:
    assert server._process is not None
    leader = psutil.Process(server._process.pid)
    return [leader, *leader.children(recursive=True)]


def test_keys_are_in_no_list_and_no_log(started: Served) -> None:
    server = started.server
    processes = group(server)
    assert len(processes) >= 4  # SGLang itself, its reaper, a scheduler, a detokenizer
    for process in processes:
        seen = " ".join([*process.cmdline(), *process.environ().values()])
        assert server.api_key not in seen and server.admin_key not in seen
    assert all(os.getpgid(process.pid) == processes[0].pid for process in processes)
    log = server.log_path.read_text()
    assert server.api_key not in log and server.admin_key not in log


def test_it_listens_on_loopback(started: Served) -> None:
    """All but the store of SGLang's ranks, which torch binds to every address."""
    listening = {
        one.laddr.port: one.laddr.ip
        for process in group(started.server)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening[started.server.port] == "127.0.0.1"
    others = [ip for ip in listening.values() if ip != "127.0.0.1"]
    assert others == ["::"]


def test_a_request_without_a_key_is_refused(started: Served) -> None:
    server = started.server
    receiver = Receiver(server.url, 1, "cpu", needs_all=False)
    readers = replace(receiver, api_key=server.api_key, admin_key=server.api_key)
    with control_client() as http:
        with pytest.raises(WeightSyncError, match=r"/model_info returned HTTP 401"):
            Servers([receiver], http=http).request_each("/model_info")
        with pytest.raises(WeightSyncError, match=r"/flush_cache returned HTTP 401"):
            Servers([readers], http=http).request_each("/flush_cache", {server.url: {}})


def test_counters_change_with_work_alone(started: Served) -> None:
    server = started.server
    handle = ServerHandle(server.url, server.api_key, server.admin_key)

    async def counters() -> list[Any]:
        probes = Probes()
        try:
            return await probes.counters(handle)
        finally:
            await probes.close()

    before = asyncio.run(counters())
    assert len(before) == 1 and all(isinstance(count, int) for count in before[0])
    assert asyncio.run(counters()) == before
    with started.client as client:
        prompt = prompts(started.processor)["one image"]
        generate(client, [prompt], n=1, sampling_params=SamplingParams(1.0, 2))
    assert asyncio.run(counters()) != before


@pytest.mark.slow
def test_folder_that_sglang_cannot_serve(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = "many"
    (broken / "config.json").write_text(json.dumps(config))
    server = ManagedServer(
        ServerOptions(broken, dtype="float32", device="cpu"), log_path=tmp_path / "server.log"
    )
    with pytest.raises(RolloutServerError, match=r"ended with exit code(.|\n)*num_hidden_layers"):
        with run_server(server):
            pass


@pytest.mark.slow
def test_parent_killed_while_workers_start(folder: Path, tmp_path: Path) -> None:
    """The worst moment: a worker was just forked, and has not asked to die with its parent."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), str(tmp_path / "server.log")],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    started: list[psutil.Process] = []
    while len(started) < 3:  # the server, its reaper, a worker
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.02)
        started = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(started, timeout=scaled(60))
    assert not alive


@pytest.mark.slow
def test_a_forked_server_ends_with_the_process_that_started_it(
    folder: Path, tmp_path: Path
) -> None:
    """As one that is executed, though it is a child of another process."""
    server = ManagedServer(
        ServerOptions(folder, dtype="float32", device="cpu"), log_path=tmp_path / "server.log"
    )
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def start() -> None:
        with run_server(server):
            sender.send([process.pid for process in group(server)])
            os.kill(os.getpid(), signal.SIGKILL)

    with forking_servers():
        starter = multiprocessing.get_context("fork").Process(target=start)
        starter.start()
        assert receiver.poll(scaled(120)), server.log_path.read_text()
        processes = [psutil.Process(pid) for pid in receiver.recv() if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(processes, timeout=scaled(30))
        starter.join()
        assert not alive
        with run_server(server):
            assert group(server), "the next one starts"

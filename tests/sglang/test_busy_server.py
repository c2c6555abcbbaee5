"""The real server while it answers no probe: busy with one forward pass, and stopped."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool import probes, supervisor
from megavlm.inference.server_pool.handle import ServerHandle
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.state import RestartPolicy, State
from tests.conftest import DATA, png
from tests.support.forked_servers import forking_servers
from tests.support.generation import generate

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("sglang")]

SIDE = 2520  # pixels of an image whose forward pass takes some 20 s


def test_a_busy_server_lives_and_a_stopped_one_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_EVERY", 1.0)
    monkeypatch.setattr(probes, "SLOW", 3.0)  # SGLang's 20 s may be longer than the forward pass
    folder, lines = tmp_path / "model", list[str]()
    make_tiny_model(folder, ["What is it?"] * 10, seed=0, max_pixels=SIDE**2)
    prompt = Processor(folder, DATA, family_of(folder)).prompt(
        Row(0, "What is it?", "", (png(SIDE, SIDE),), "", "x")
    )
    server = ManagedServer(
        ServerOptions(folder, dtype="float32", device="cpu"), log_path=tmp_path / "server.log"
    )
    policy = RestartPolicy(needs_refit=False, health_check_timeout=5.0)
    pool = ServerPool([ServerHandle.managed(server)], policy, log=lines.append)
    with forking_servers(), pool:
        url, was_busy = server.url, threading.Event()

        def watch() -> None:
            while not (was_busy.is_set() or finished.is_set()):
                if pool.record(url).busy:
                    was_busy.set()
                time.sleep(0.1)

        finished = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        with RolloutClient(pool, RequestLimits(total=1800)) as client:
            sampling_params = SamplingParams(temperature=1.0, max_new_tokens=1)
            ((response,),) = generate(client, [prompt], n=1, sampling_params=sampling_params)
        finished.set()
        watcher.join()
        assert was_busy.is_set() and response.is_complete
        assert pool.record(url).state is State.HEALTHY and pool.record(url).restarts == 0
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGSTOP)
        while pool.record(url).restarts == 0 or pool.record(url).state is State.STARTING:
            time.sleep(0.1)
        assert pool.record(url).state is State.HEALTHY
    (death,) = (line for line in lines if "died" in line)
    assert "is busy" in lines[0] and "rollout.health_check_timeout" in death and "restarts" in death

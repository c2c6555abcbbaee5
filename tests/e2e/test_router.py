"""Runs at servers that were started elsewhere: behind the real sglang-router, whose weights go to
the servers, and with servers that join and leave.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from megavlm.inference.server import ClaimedPort, ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_process import ADMIN_KEY, API_KEY
from megavlm.process import ExitCode
from megavlm.run.servers import change_servers
from tests.e2e.conftest import World
from tests.e2e.running import running
from tests.e2e.test_replay import weights
from tests.support.forked_servers import forking_servers
from tests.support.servers import wait_until_healthy
from tests.support.timeouts import scaled

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

KEYS = {API_KEY: "reads", ADMIN_KEY: "writes"}
START = scaled(300)  # seconds
# With the key over standard input, as nobody may see it in the list of processes; and without
# sglang, which its Python part would import in vain.
ROUTER = """
import sys
sys.modules["sglang"] = None
from sglang_router.launch_router import launch_router, parse_router_args
launch_router(parse_router_args([*sys.argv[1:], "--api-key", sys.stdin.readline().strip()]))
"""


@contextmanager
def servers(world: World, folder: Path) -> Iterator[list[ManagedServer]]:
    """Two, with the keys that a run of external servers knows."""
    model = (world.root / "model").resolve()  # not the run's, to end with it
    with ExitStack() as stack:
        both = []
        for index in range(2):
            server = ManagedServer(
                ServerOptions(
                    model,
                    dtype="float32",
                    device="cpu",
                    server_args={"log_level": "info"},
                ),
                log_path=folder / f"server_{index}.log",
                start_timeout=START,
            )
            server.api_key, server.admin_key = KEYS.values()
            with forking_servers():
                server.launch()
            stack.callback(server.stop)
            both.append(server)
        for server in both:
            wait_until_healthy(server)
        yield both


@contextmanager
def router(urls: list[str], log: Path) -> Iterator[str]:
    port, metrics_port = ClaimedPort(), ClaimedPort()
    url = f"http://127.0.0.1:{port.number}"
    words = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port.number)]
    words += ["--prometheus-port", str(metrics_port.number), "--policy", "round_robin"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-P", "-c", ROUTER, *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(KEYS[API_KEY].encode() + b"\n")
            process.stdin.close()
            while known(url) < len(urls):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.kill()


def known(url: str) -> int:
    """How many servers the router has found well."""
    try:
        reply = httpx.get(f"{url}/workers", headers={"Authorization": f"Bearer {KEYS[API_KEY]}"})
        return sum(worker["is_healthy"] for worker in reply.json()["workers"])
    except httpx.HTTPError:
        return 0


def test_requests_by_the_router_and_weights_past_it(world: World, tmp_path: Path) -> None:
    with (
        servers(world, tmp_path) as both,
        router([server.url for server in both], tmp_path / "router.log") as front,
    ):
        assert httpx.post(f"{front}/generate", json={"input_ids": [[1]]}).status_code == 401
        recipe = world.recipe(
            "routed",
            algorithm={
                "name": "grpo",
                "steps": 3,
                "prompts_per_step": 8,
                "responses_per_prompt": 4,
                "entropy_coefficient": 0.01,
            },
            optimizer={"lr": 1e-3},
            rollout={
                "mode": "external",
                "urls": [server.url for server in both],
                "router": front,
                "suppress_special_tokens": False,
                "concurrency": 2,
            },
            evaluation={"after": True},
        )
        done = world.megavlm("train", recipe, **KEYS)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = world.metrics("routed")
        assert [step["step"] for step in steps] == [1, 2, 3]
        for step in steps:
            assert step["episodes"] == 32
            assert step["rollout_max_difference"] < 1e-4, "images, log-probs and weights are ours"
        for server in both:
            log = server.log_path.read_text()
            assert log.count('"POST /generate HTTP/1.1" 200') >= 3, "both were asked"
            assert log.count('"POST /update_weights_from_tensor HTTP/1.1" 200') == 4


@pytest.mark.parametrize("sync", [pytest.param("distributed", marks=pytest.mark.long), "store"])
def test_a_server_joins_and_another_leaves(
    sync: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer computes the log-probs of all tokens again: each is of the weights that it says.
    The run ends, and goes on with the servers that it had last. Its replay, which has no servers,
    comes to the same bits.
    """
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    name = f"joined_{sync}"
    folder = world.root / name
    with servers(world, tmp_path) as (first, second):
        rollout = {"mode": "external", "urls": [first.url], "sync": sync, "max_new_tokens": 40}
        recipe = world.recipe(
            name, **JOINED, rollout=rollout, run={"record_rollouts": True, "summary": False}
        )
        with running(recipe, folder) as run:
            run.wait_for_steps(1)
            change_servers(folder, second.url, "add")
            run.wait_until(lambda: answers(second) > 2)
            change_servers(folder, first.url, "remove")
            run.wait_until(lambda: first.url not in (folder / "servers.json").read_text())
            before = answers(first)
            first.stop()
            run.wait_for_steps(len(world.metrics(name)) + 2)
            run.process.send_signal(signal.SIGTERM)
        assert run.wait() == ExitCode.STOPPED, run.output
        assert f"rollout server {first.url} has left the run" in run.output
        count = len(world.metrics(name))
        done = world.megavlm("train", recipe, f"algorithm.steps={count + 1}", **KEYS)
        assert done.returncode == 0, done.stdout + done.stderr
    steps = world.metrics(name)
    assert [step["step"] for step in steps] == [*range(1, count + 2)]
    for step in steps:
        assert step["episodes"] == 16, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4
        assert (step.get("sync_chain_bytes", 0) > 0) == (sync == "store")
    assert answers(first) == before
    replay = world.recipe(f"{name}_again", **JOINED, rollout={"replay": str(folder / "rollouts")})
    done = world.megavlm("train", replay, f"algorithm.steps={count + 1}")
    assert done.returncode == 0, done.stderr
    trained, again = (weights(x, count + 1) for x in (folder, world.root / f"{name}_again"))
    assert trained.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in trained.items())


INFO, UPDATE = "GET /server_info", "POST /update_weights_from_tensor"
HELD = """
import pathlib, time
def held(responses, rows, turns):
    hold = pathlib.Path({folder!r}, "hold")
    while hold.exists():
        hold.with_name("holds").touch()
        time.sleep(0.02)
    return [0.0] * len(responses)
"""


def test_a_server_killed_in_the_middle_of_a_chain_comes_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was killed reads the chain when it is back, while the run waits for a reward.
    It is killed again after the base, at a file of the changes, and then comes back for good.
    """
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    (tmp_path / "my_reward.py").write_text(HELD.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder, hold, holds = world.root / "killed_in_chain", tmp_path / "hold", tmp_path / "holds"
    with servers(world, tmp_path) as (first, second):
        recipe = world.recipe(
            "killed_in_chain",
            **JOINED,
            rollout={"mode": "external", "urls": [first.url, second.url], "sync": "store"},
            reward={
                "parts": {"right": {"name": "vqa"}, "held": {"name": "my_reward:held"}},
                "timeout": START,
            },
            run={"summary": False},
        )

        def kill() -> None:
            for process in second._family():
                process.kill()
            second.stop()

        def start() -> None:
            with forking_servers():
                second.launch()

        with running(recipe, folder) as run:
            run.wait_for_steps(2)
            hold.touch()
            run.wait_until(holds.exists)
            while json.loads((link := newest_link(folder)).read_text())["parent"] is None:
                hold.unlink()  # this link is a base
                run.wait_for_steps(len(world.metrics("killed_in_chain")) + 1)
                holds.unlink()
                hold.touch()
                run.wait_until(holds.exists)
            kill()
            run.wait_until(lambda: state(folder, second.url) == "dead")
            # Opening this file waits for a writer, and none comes.
            changes = link.with_name("0.0")
            content = changes.read_bytes()
            changes.unlink()
            os.mkfifo(changes)
            asked, updated = (count_of(second, path) for path in (INFO, UPDATE))
            start()
            run.wait_until(lambda: count_of(second, INFO) > asked)
            time.sleep(3.0)  # within a second it is asked to load, and it loads the base first
            assert count_of(second, UPDATE) == updated, "it is in the middle of the chain"
            kill()
            changes.unlink()
            changes.write_bytes(content)
            start()
            run.wait_until(lambda: state(folder, second.url) == "healthy")
            count = answers(second)
            hold.unlink()
            run.wait_until(lambda: answers(second) > count)
            run.wait_for_steps(len(world.metrics("killed_in_chain")) + 2)
            run.process.send_signal(signal.SIGTERM)
        assert run.wait() == ExitCode.STOPPED, run.output
    for step in world.metrics("killed_in_chain"):
        assert step["episodes"] == 16, "no sample lost, none doubled"
        assert step["rollout_max_difference"] < 1e-4


def state(folder: Path, url: str) -> str:
    rows = json.loads((folder / "servers.json").read_text())["servers"]
    return str(next(row["state"] for row in rows if row["url"] == url))


def newest_link(folder: Path) -> Path:
    return max(folder.glob("store/*/0.json"), key=lambda path: path.stat().st_mtime_ns)


JOINED: dict[str, Any] = {
    "algorithm": {
        "name": "grpo",
        "steps": 1000,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "entropy_coefficient": 0.01,
    },
    # By default the warmup is a share of algorithm.steps, which the replay changes.
    "optimizer": {"lr": 1e-3, "warmup_steps": 0},
    "data": {"pack_tokens": 1024},
    "checkpoint": {"every": 1},
}


def answers(server: ManagedServer) -> int:
    return count_of(server, "POST /generate")


def count_of(server: ManagedServer, request: str) -> int:
    """Return how often a server has answered a request."""
    return server.log_path.read_text().count(f'"{request} HTTP/1.1" 200')

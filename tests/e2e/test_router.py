"""A run whose requests go through the real sglang-router, and whose weights go to the servers."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from megavlm.inference.server import ClaimedPort, ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_process import ADMIN_KEY, API_KEY
from tests.e2e.conftest import World
from tests.support.forked_servers import forking_servers
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
            server._wait_until_healthy(time.monotonic() + START)
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

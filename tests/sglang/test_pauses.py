"""Pushes under a request that runs: what becomes of it, by way of pausing, and that new requests
are answered by the new weights alone, though their prompts were computed before.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from megavlm.inference.server_pool.requirements import Requirements
from megavlm.weight_sync.coordinator import CONTINUE
from tests.parity.reference import Reference
from tests.sglang.conftest import Served
from tests.sglang.pushes import Trainer, changed, push
from tests.sglang.questions import prompts
from tests.sglang.test_server import group
from tests.sglang.test_weights import differences
from tests.support.fork import launch
from tests.support.timeouts import scaled

START = scaled(600)  # seconds
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(1200),
]
LONG = 10_000  # tokens: it runs until it is ended
BUSY = 3.0  # seconds of processor time


class Request:
    """A request that has begun to be answered; `chunks`: what has come so far."""

    def __init__(self, served: Served) -> None:
        self.served, self.chunks = served, []
        self.has_begun = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {
            "input_ids": list(prompts(self.served.processor)["text"].request_ids),
            "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True},
            "stream": True,
        }
        keys = {"Authorization": f"Bearer {self.served.server.api_key}"}
        url = self.served.server.url + "/generate"
        with httpx.stream("POST", url, json=body, headers=keys, timeout=START) as reply:
            rest = b""
            # Not iter_lines: a text may hold other ends of lines than a newline.
            for received in reply.iter_bytes():
                *lines, rest = (rest + received).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        self.chunks.append(json.loads(line.removeprefix(b"data: ")))
                        self.has_begun.set()
        self.has_begun.set()

    @property
    def last(self) -> Any:
        return self.chunks[-1]["meta_info"]


@contextmanager
def running(served: Served) -> Iterator[Request]:
    request = Request(served)
    request.thread.start()
    try:
        assert request.has_begun.wait(START) and request.chunks
        yield request
    finally:
        served.post("/abort_request", {"abort_all": True})
        request.thread.join()


def push_under_a_request(served: Served, pause: str, tmp_path: Path) -> Request:
    """Which has ended; the answers to others, right after the push, are checked."""
    differences(served, Reference(served.folder), "start", seed=0)
    weights = changed(served.folder, tmp_path / "weights", tower=False, seed=17)
    trainer = Trainer(weights, "one rank")
    with running(served) as request:
        launch(1, push, [served.receiver], "tensor", trainer, tmp_path, 5, pause)
        after = differences(served, Reference(weights), 5, seed=0)
        assert max(after.values()) < 1e-4, after
    return request


def versions(request: Request) -> list[str]:
    return [span["version"] for span in request.last["weight_versions"]]


def test_abort_ends_it(served: Served, tmp_path: Path) -> None:
    request = push_under_a_request(served, "abort", tmp_path)
    assert request.last["finish_reason"]["type"] == "abort"
    assert versions(request) == ["start"]


def test_retract_computes_it_anew(served: Served, tmp_path: Path) -> None:
    request = push_under_a_request(served, "retract", tmp_path)
    assert versions(request) == ["start", "5"], "it went on"


def test_in_place_goes_on_beside_prefixes_of_the_new_weights(
    served: Served, tmp_path: Path
) -> None:
    """Its cache is not flushed, and the same prompts were computed by the old weights."""
    request = push_under_a_request(served, "in_place", tmp_path)
    assert versions(request) == ["start", "5"]


def test_a_paused_server_sleeps(started: Served) -> None:
    """Beside a process that does not, and so has as much of a busy machine as it could have."""

    def spent(processes: list[psutil.Process]) -> float:
        times = [process.cpu_times() for process in processes]
        return sum(of.user + of.system for of in times)

    started.post("/pause_generation", {"mode": "in_place"})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, beside = spent(group(started.server)), [psutil.Process(busy.pid)]
        while spent(beside) < BUSY:
            time.sleep(0.05)
        assert spent(group(started.server)) - before < BUSY / 2
        assert started.get("/model_info"), "it answers"
    finally:
        busy.kill()
        busy.wait()
        started.post("/continue_generation", CONTINUE)


def test_a_server_that_does_not_tell_is_refused(started: Served) -> None:
    info = started.get("/server_info")
    with pytest.raises(ValueError, match="start it with"):
        Requirements(fresh_images=True).read(info)
    assert Requirements().read(info) == (1, "cpu", True)

"""Depth of our own call stack between a weight update and its HTTP requests."""

import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import megavlm
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.targets import Target
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync import sync as sync_module
from megavlm.weight_sync.attempt import SyncSettings
from megavlm.weight_sync.plan import SyncPlan, TrainerRanks
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from tests.distributed.fork import launch
from tests.fakes.engine import FakeEngine, GlooEngine
from tests.fakes.targets import FixedTargets
from tests.timeouts import scaled
from tests.unit.weight_sync.test_sync_faults import ENTRIES, UPDATE, Model

PACKAGE = str(Path(megavlm.__file__).parent)
MOST = 6  # `update_weights` and five more; two lead to it from `train_step`
THREAD = threading.local()
submit = ThreadPoolExecutor.submit


def frames() -> list[str]:
    """Our frames that lead here, with those that led to the start of this thread."""
    ours = [frame.name for frame in traceback.extract_stack() if PACKAGE in frame.filename]
    return [*getattr(THREAD, "frames", []), *ours]


def submit_with_frames(self: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
    lead = frames()

    def run() -> Any:
        THREAD.frames = lead
        return work(*args, **kwargs)

    return submit(self, run)


class Recorder(httpx.HTTPTransport):
    """Records (path, our frames) of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str]]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((request.url.path, frames()))
        return super().handle_request(request)


def recorded(kind: str, folder: Path, url: str, failing: bool) -> list[tuple[str, list[str]]]:
    """On a rank: the requests of two updates, the first of everything."""
    recorder = Recorder()
    sync_module.control_client = lambda: httpx.Client(transport=recorder)
    ThreadPoolExecutor.submit = submit_with_frames  # type: ignore[method-assign]
    transports: dict[str, Transport] = {
        "tensor": TensorTransport(),
        "disk": DiskTransport(folder),
        "distributed": DistributedTransport("127.0.0.1", timeout=scaled(30)),
    }
    plan = SyncPlan(ENTRIES, TrainerRanks(Layout(), 1, (0,) * 4), frozenset(range(4)))
    device = "cuda" if kind == "disk" else "cpu"  # the fake server loads no files to compare
    targets = FixedTargets([Target(url, 1, device, needs_all=True)])
    sync = WeightSync(
        plan,
        [Model(plan)],  # type: ignore[list-item]
        transports[kind],
        SyncSettings(torch.float32, timeout=scaled(30), bucket_bytes=24),
        targets=targets,
    )
    for version in (1, 2):
        try:
            sync.update_weights(version)
            assert not failing
        except WeightSyncError:
            assert failing
        if kind == "distributed":
            targets.failed(url, "")  # so that its group is left
    return recorder.calls


def check_depth(calls: list[tuple[str, list[str]]], *paths: str) -> None:
    assert {path for path, _ in calls} >= set(paths)
    for path, ours in calls:
        assert ours[0] == "update_weights" and ours[-1] == "request", (path, ours)
        assert len(ours) <= MOST, (path, ours)


@pytest.mark.parametrize("kind", ["tensor", "disk"])
def test_requests_are_at_most_five_frames_below_the_update(kind: str, tmp_path: Path) -> None:
    with FakeEngine() as engine:
        (calls,) = launch(1, recorded, kind, tmp_path, engine.url, False)
    of_tensors = {
        "tensor": (UPDATE, "/begin_weight_update", "/weights_checker"),
        "disk": ("/update_weights_from_disk",),
    }
    check_depth(calls, *of_tensors[kind], "/model_info", "/continue_generation")


def test_broadcasts_are_at_most_five_frames_below_the_update(tmp_path: Path) -> None:
    with GlooEngine() as engine:
        (calls,) = launch(1, recorded, "distributed", tmp_path, engine.url, False)
    check_depth(
        calls,
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    )


def test_requests_of_a_failing_update_are_no_deeper(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.refused[UPDATE] = set(range(1, 100))
        (calls,) = launch(1, recorded, "tensor", tmp_path, engine.url, True)
    check_depth(calls, UPDATE, "/end_weight_update", "/continue_generation")

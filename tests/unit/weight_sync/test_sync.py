"""A push of two ranks against a server that refuses a step: no version advances, no rank hangs."""

import base64
import io
import logging
import pickle
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megavlm.config.rollout import Rollout
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.mapping import ROWS, gated, same, shard_tensor
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.lora import unload_adapters
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.server_api import Servers, control_client
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports import TRANSPORTS, disk
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncReport, SyncSettings, sync_metrics
from tests.fakes.receivers import FixedReceivers
from tests.fakes.server import FakeServer
from tests.support.fork import launch

UPDATE, VERSION = "/update_weights_from_tensor", "/update_weight_version"
ENTRIES = [
    same("visual.norm", "visual.norm.weight", (3,)),
    same("embedding", "model.embed_tokens.weight", (8, 3), ROWS),
    gated("fc1", "gate_proj.weight", "up_proj.weight", (4, 3)),
    same("norm", "model.norm.weight", (3,)),
]
FULL = {
    "visual.norm": torch.ones(3),
    "embedding": torch.arange(24.0).view(8, 3),
    "fc1": torch.arange(24.0).view(8, 3) + 50,
    "norm": torch.tensor([4.0, 5.0, 6.0]),
}


class Model(nn.Module):
    """This rank's shards, the tower's frozen."""

    def __init__(self) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.shards = nn.ParameterList()
        for entry in ENTRIES:
            shard = shard_tensor(entry, FULL[entry.megatron], rank, size)
            frozen = entry.megatron.startswith("visual")
            self.shards.append(nn.Parameter(shard.clone(), requires_grad=not frozen))

    def sharded_state_dict(self, metadata: Any) -> dict[str, ShardedTensor]:
        pairs = zip(ENTRIES, self.shards, strict=True)
        return {e.megatron: ShardedTensor.from_rank_offsets(e.megatron, p) for e, p in pairs}


def pushes(
    url: str,
    versions: tuple[int, ...],
    full: bool,
    folder: Path | None,
    device: str = "cuda",
    pause: str = "abort",
) -> dict[str, Any]:
    receivers = None
    if dist.get_rank() == 0:
        receivers = FixedReceivers([Receiver(url, 1, device, full, "reads", "writes")])
    size = dist.get_world_size()
    sync = WeightSync(
        SyncPlan(ENTRIES, TrainerRanks(Layout(tensor=size), size), frozenset({1, 2, 3})),
        [Model()],  # type: ignore[list-item]  # of a MegatronModule only what a push needs
        TensorTransport() if folder is None else DiskTransport(folder),
        SyncSettings(torch.float32, bucket_bytes=100, pause=pause),
        receivers=receivers,
    )
    errors, report = [], None
    for version in versions:
        try:
            report = sync.update_weights(version)
        except WeightSyncError as error:
            errors.append(str(error))
    sync.close()
    return {"version": sync.version, "errors": errors, "report": report}


def sent(fake: FakeServer) -> list[dict[str, Tensor]]:
    """The tensors of each update, as SGLang takes a bucket apart."""
    buckets = []
    for _, body, _ in (request for request in fake.requests if request[0] == UPDATE):
        (payload,) = body["serialized_named_tensors"]
        bucket = pickle.load(io.BytesIO(base64.b64decode(payload)))  # noqa: S301  # our own
        flat = bucket["flattened_tensor"]
        buckets.append(
            {
                place.name: flat[place.start_idx : place.end_idx]
                .view(place.dtype)
                .view(place.shape)
                for place in bucket["metadata"]
            }
        )
    return buckets


SESSION = ("/begin_weight_update", "/end_weight_update")


def paths(fake: FakeServer) -> list[str]:
    return [path for path, *_ in fake.requests]


@pytest.mark.parametrize("full", [False, True])
def test_what_is_sent(full: bool) -> None:
    with FakeServer() as fake:
        results = launch(2, pushes, fake.url, (5,), full, None)
        buckets = sent(fake)
        sequence = [path for path in paths(fake) if path not in ("/server_info", UPDATE)]
        keys = {path: key for path, _, key in fake.requests}
    merged = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    expected = {
        name: tensor
        for entry in ENTRIES[0 if full else 1 :]
        for name, tensor in zip(entry.hf, entry.to_hf(FULL[entry.megatron]), strict=True)
    }
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert len(buckets) > 1  # portions
    assert sequence == [
        "/pause_generation",
        *(["/end_weight_update"] if full else []),  # of a session that was left open
        "/begin_weight_update",
        "/end_weight_update",
        *(["/freeze_gc"] if full else []),
        "/flush_cache?timeout=20",
        VERSION,
        "/model_info",
        "/continue_generation",
    ]
    assert keys[UPDATE] == "Bearer writes" and keys["/model_info"] == "Bearer reads"
    assert results[0] == results[1] and results[0]["version"] == 5
    assert results[0]["report"].tensors == len(expected)


@pytest.mark.parametrize("full", [False, True])
def test_servers_before_sessions_are_updated_without(full: bool) -> None:
    """SGLang 0.5.20 and older answer begin_weight_update with 404."""
    with FakeServer() as fake:
        fake.info = {"version": "0.5.17"}
        fake.refused |= {path: {1, 2} for path in SESSION}
        launch(2, pushes, fake.url, (5,), full, None)
        assert fake.weight_version == "5"
        assert not {*SESSION} & {*paths(fake)} and UPDATE in paths(fake)


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/begin_weight_update", 1),
        (UPDATE, 1),
        (UPDATE, 2),
        ("/end_weight_update", 1),
        (VERSION, 1),
    ],
)
def test_refusal_of_any_step(path: str, call: int) -> None:
    """Both ranks hear of it, the version stays, the session is closed, and the next push heals."""
    with FakeServer(weight_version="3") as fake:
        fake.refused[path] = {call}
        results = launch(2, pushes, fake.url, (4,), False, None)
        assert fake.weight_version == "3"
        assert "/end_weight_update" in paths(fake)
        for result in results:
            assert result["version"] is None
            (error,) = result["errors"]
            assert "weight update to version 4 failed" in error and path in error
            assert "refused as scripted" in error
        fake.refused.clear()
        results = launch(2, pushes, fake.url, (5,), False, None)
        assert [result["version"] for result in results] == [5, 5] and fake.weight_version == "5"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/server_info", "garbage"),
        ("/server_info", "list"),
        ("/model_info", "garbage"),
        ("/model_info", "wrong form"),
        ("/weights_checker", "wrong form"),
    ],
)
def test_an_answer_in_another_form_fails_the_push(path: str, fault: Any) -> None:
    with FakeServer(device="cpu") as fake:
        fake.faults[path, 1] = fault
        device = "cpu" if path == "/weights_checker" else "cuda"  # whose checksums are compared
        (result,) = launch(1, pushes, fake.url, (4,), False, None, device)
    (error,) = result["errors"]
    assert "weight update to version 4 failed" in error and path in error


def test_server_that_does_not_take_the_version() -> None:
    with FakeServer() as fake:
        fake.deaf = True
        results = launch(2, pushes, fake.url, (4,), False, None)
    for result in results:
        assert "reports weight version '1'" in result["errors"][0]


def test_no_server() -> None:
    port = ClaimedPort()
    (result,) = launch(1, pushes, f"http://127.0.0.1:{port.number}", (4,), False, None)
    assert "/server_info failed: ConnectError" in result["errors"][0]


def test_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with FakeServer() as fake:
        fake.refused["/update_weights_from_disk"] = {1}
        (result,) = launch(1, pushes, fake.url, (4, 5), False, tmp_path / "weights")
        assert len(result["errors"]) == 1 and result["version"] == 5
        # the refused one, then what all servers get, then what only this stale one does
        (request, _, _) = (body for path, body, _ in fake.requests if "from_disk" in path)
    assert request["load_format"] == "safetensors"
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("step", ["prepare", "commit"])
def test_a_folder_that_cannot_be_written(step: str, tmp_path: Path) -> None:
    """Both ranks hear of it, and the server goes on with what it has."""
    folder = tmp_path / "weights"
    if step == "prepare":
        folder.write_text("no folder")
    with FakeServer() as fake:
        push = pushes if step == "prepare" else pushes_that_cannot_rename
        results = launch(2, push, fake.url, (4,), False, folder)
        assert paths(fake)[-1] == "/continue_generation" and fake.weight_version == "1"
    for result in results:
        (error,) = result["errors"]
        assert (
            "weight update to version 4 failed" in error and f"{folder} cannot be written" in error
        )


def pushes_that_cannot_rename(*arguments: Any) -> dict[str, Any]:
    def refuse(source: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied", str(to))

    disk.os.rename = refuse  # type: ignore[attr-defined]
    return pushes(*arguments)


def test_a_cache_is_flushed_once_and_never_under_requests_that_go_on() -> None:
    """SGLang refuses it then, and servers that go on in place have no cache of prefixes."""
    with FakeServer() as fake:
        launch(1, pushes, fake.url, (4,), False, None, "cuda", "retract")
        assert len(sent(fake)) > 1
        launch(1, pushes, fake.url, (5,), False, None, "cuda", "in_place")
        asked = [path for path in paths(fake) if "flush" in path]
        flushing = [body.get("flush_cache") for path, body, _ in fake.requests if path == UPDATE]
        assert fake.bodies("/pause_generation") == [{"mode": "retract"}, {"mode": "in_place"}]
    assert asked == ["/flush_cache"] and not any(flushing)


def test_connections_are_kept_from_push_to_push() -> None:
    with FakeServer() as fake:
        launch(1, pushes, fake.url, (4, 5, 6), False, None)
        assert len(fake.requests) > 20 and fake.num_connections <= 2


def test_what_a_server_is_is_read_once_a_process() -> None:
    with FakeServer() as fake:
        launch(1, pushes, fake.url, (4, 5, 6), False, None)
        assert paths(fake).count("/server_info") == 1
    with FakeServer() as fake:
        fake.refused["/pause_generation"] = {2}
        (result,) = launch(1, pushes, fake.url, (4, 5, 6), False, None)
        assert len(result["errors"]) == 1
        # After the second update failed, the server may be another process.
        assert paths(fake).count("/server_info") == 2


def warnings_of(url: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megavlm.weight_sync").addHandler(handler)
    pushes(url, (4, 5), False, None)
    return lines


def test_what_cannot_be_compared_is_told_once() -> None:
    """Checksums of a GPU's tensors are made by a GPU, and there is none here."""
    with FakeServer(device="cuda") as fake:
        (lines,) = launch(1, warnings_of, fake.url)
    (line,) = lines
    assert "verified by its version alone" in line


def test_only_the_current_adapter_stays() -> None:
    with FakeServer() as fake, control_client() as http:
        fake.adapters = ["megavlm-3", "theirs", "megavlm-4", "megavlm-41"]
        servers = Servers([Receiver(fake.url, 1, "cpu", needs_all=False)], http=http)
        unload_adapters(servers, but="megavlm-4")
        assert fake.adapters == ["theirs", "megavlm-4"]


def test_measures_are_of_all_pushes_of_a_step() -> None:
    first = SyncReport(seconds=1.0, bytes=10, tensors=2, checked=4, servers=1)
    second = SyncReport(seconds=1.0, bytes=5, tensors=1, checked=0, servers=2)
    assert sync_metrics([]) == {}
    assert sync_metrics([first, second]) == {
        "sync_seconds": 2.0,
        "sync_bytes": 15,
        "sync_tensors": 3,
        "sync_checked": 4,
        "sync_servers": 2,
    }


def test_every_name_of_rollout_sync_has_a_transport_and_its_traits() -> None:
    names = get_args(get_type_hints(Rollout)["sync"])
    assert {*names} == TRANSPORTS.keys() == TRANSPORT_TRAITS.keys()

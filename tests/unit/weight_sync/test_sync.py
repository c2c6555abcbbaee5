"""A push of two ranks against a server that refuses a step: no version advances, no rank hangs."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from megavlm.config.rollout import Rollout
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_support import megavlm_weights
from megavlm.models.common.mapping import ROWS, gated, same, shard_tensor
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.coordinator import FLUSH
from megavlm.weight_sync.lora import unload_adapters
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.server_api import Servers, control_client
from megavlm.weight_sync.sglang_layout import ServerLayout, server_tensors
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports import TRANSPORTS, disk
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncReport, SyncSettings, sync_metrics
from tests.fakes.engine import UPDATE, FakeEngine, unpack
from tests.fakes.receivers import FixedReceivers
from tests.fakes.server import FakeServer
from tests.support.fork import launch
from tests.support.timeouts import scaled

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


HUB = {
    name: tensor
    for entry in ENTRIES
    for name, tensor in zip(entry.hf, entry.to_hf(FULL[entry.megatron]), strict=True)
}
STORED = dict(server_tensors(HUB, ServerLayout(on_cpu=True), 0))
SHAPES = [{name: tensor.shape for name, tensor in STORED.items()}]


def pushes(
    url: str,
    versions: tuple[int, ...],
    full: bool,
    folder: Path | None = None,
    pause: str = "abort",
    device: str = "cpu",
    flush_aborted: bool = False,
) -> dict[str, Any]:
    receivers = None
    if dist.get_rank() == 0:
        receivers = FixedReceivers([Receiver(url, 1, device, full, "reads", "writes")])
    size = dist.get_world_size()
    sync = WeightSync(
        SyncPlan(ENTRIES, TrainerRanks(Layout(tensor=size), size), frozenset({1, 2, 3})),
        [Model()],  # type: ignore[list-item]  # of a MegatronModule only what a push needs
        TensorTransport(timeout=scaled(30)) if folder is None else DiskTransport(folder),
        SyncSettings(
            torch.float32, bucket_bytes=100, pause_mode=pause, flush_aborted=flush_aborted
        ),
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


PUSH = ["/pause_generation", UPDATE, "/continue_generation"]


@pytest.mark.parametrize("full", [False, True])
def test_what_is_sent(full: bool) -> None:
    with FakeEngine(SHAPES) as fake:
        results = launch(2, pushes, fake.url, (5,), full)
        keys = {path: key for path, _, key in fake.requests}
        assert fake.paths() == ["/server_info", *PUSH] and fake.weight_version == "5"
    for name, tensor in STORED.items():
        is_sent = full or "visual" not in name
        assert torch.equal(fake.weights[name], tensor * is_sent), name
    assert keys[UPDATE] == "Bearer writes" and keys["/server_info"] == "Bearer reads"
    assert results[0] == results[1] and results[0]["version"] == 5
    report = results[0]["report"]
    assert (report.tensors, report.checked) == (5, 4) if full else (4, 3)


def test_a_refusal_before_the_update() -> None:
    """Both ranks hear of it, and the version stays."""
    with FakeEngine(SHAPES) as fake:
        fake.refused[PUSH[0]] = {1}
        results = launch(2, pushes, fake.url, (4,), False)
        assert fake.weight_version == "3" and not fake.is_paused
        for result in results:
            assert result["version"] is None
            (error,) = result["errors"]
            assert "weight update to version 4 failed" in error and PUSH[0] in error
            assert "refused as scripted" in error


def test_a_server_without_our_loader_is_told_how_it_must_be_started() -> None:
    with FakeEngine(SHAPES) as fake:
        fake.info["custom_weight_loader"] = ["megavlm_weights.load_slices"]
        (result,) = launch(1, pushes, fake.url, (4,), False)
    (error,) = result["errors"]
    assert f"{fake.url} has no weight loader of this release: start it as" in error
    assert "or set rollout.sync=disk" in error


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
def test_an_answer_in_another_form_fails_the_push(path: str, fault: Any, tmp_path: Path) -> None:
    with FakeServer(device="cpu") as fake:
        fake.faults[path, 1] = fault
        device = "cpu" if path == "/weights_checker" else "cuda"  # whose checksums are compared
        (result,) = launch(1, pushes, fake.url, (4,), False, tmp_path, "abort", device)
    (error,) = result["errors"]
    assert "weight update to version 4 failed" in error and path in error


def test_server_that_does_not_take_the_version(tmp_path: Path) -> None:
    with FakeServer() as fake:
        fake.deaf = True
        results = launch(2, pushes, fake.url, (4,), False, tmp_path, "abort", "cuda")
    for result in results:
        assert "reports weight version '1'" in result["errors"][0]


def test_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with FakeServer() as fake:
        fake.refused["/update_weights_from_disk"] = {1}
        (result,) = launch(
            1, pushes, fake.url, (4, 5), False, tmp_path / "weights", "abort", "cuda"
        )
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
        assert fake.paths()[-1] == "/continue_generation" and fake.weight_version == "1"
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


def test_only_retracted_requests_need_an_empty_cache() -> None:
    """They continue under the name of the old version; SGLang refuses a flush under requests that
    go on in place.
    """
    for pause, flushes in (("abort", False), ("retract", True), ("in_place", False)):
        with FakeEngine(SHAPES) as fake:
            launch(1, pushes, fake.url, (4,), False, None, pause)
            assert fake.bodies("/pause_generation") == [{"mode": pause}]
            (body,) = fake.bodies(UPDATE)
            assert body["flush_cache"] is flushes and body["weight_version"] == "4"


def test_caches_are_empty_before_aborted_requests_come_again() -> None:
    """They name the old version, and wait until the servers go on."""
    with FakeEngine(SHAPES) as fake:
        launch(1, pushes, fake.url, (4,), False, None, "abort", "cpu", True)
        assert fake.paths() == ["/server_info", PUSH[0], FLUSH, *PUSH[1:]]


def test_a_plan_is_sent_once_a_process() -> None:
    """And what changes is another plan than everything."""
    with FakeEngine(SHAPES) as fake:
        launch(1, pushes, fake.url, (4, 5, 6), True)
        bodies = [unpack(x["serialized_named_tensors"][0]) for x in fake.bodies(UPDATE)]
        assert ["content" in json.loads(pairs[0][0]) for pairs in bodies] == [True, True, False]


def test_what_a_server_is_is_read_once_a_process() -> None:
    with FakeEngine(SHAPES) as fake:
        fake.refused["/pause_generation"] = {2}
        (result,) = launch(1, pushes, fake.url, (4, 5, 6), False)
        assert len(result["errors"]) == 1
        # After the second update failed, the server may be another process.
        assert fake.paths().count("/server_info") == 2


def test_a_file_that_cannot_be_opened_is_told_in_a_sentence() -> None:
    with pytest.raises(OSError, match=r"cannot open .* set rollout\.sync=distributed for others"):
        megavlm_weights._opened({"file": "/proc/1/fd/999", "bytes": 8}, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 5, 4096, 2**18 + 3])
def test_a_checksum_sees_values_and_places(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(100, (count,), generator=generator).to(dtype).view(torch.uint8)
    megavlm_weights.WORDS = 2**10
    found = megavlm_weights.checksum(content)
    padded = torch.cat([content, torch.zeros(-len(content) % 8, dtype=torch.uint8)])
    words = padded.view(torch.int64).tolist()
    wanted = sum(words), sum(index * word for index, word in enumerate(words, 1))
    assert [x % 2**64 for x in found.tolist()] == [x % 2**64 for x in wanted]


def test_only_the_current_adapter_stays() -> None:
    with FakeServer() as fake, control_client() as http:
        fake.adapters = ["megavlm-3", "theirs", "megavlm-4", "megavlm-41"]
        servers = Servers([Receiver(fake.url, 1, "cpu", needs_all=False)], http=http)
        unload_adapters(servers, but="megavlm-4")
        assert fake.adapters == ["theirs", "megavlm-4"]


def test_measures_are_of_all_pushes_of_a_step() -> None:
    first = SyncReport(seconds=1.0, bytes=10, tensors=2, checked=4, servers=1)
    second = SyncReport(seconds=1.0, bytes=5, tensors=1, checked=0, servers=2, density=0.5)
    assert sync_metrics([]) == {}
    assert sync_metrics([first, second]) == {
        "sync_seconds": 2.0,
        "sync_bytes": 15,
        "sync_tensors": 3,
        "sync_checked": 4,
        "sync_servers": 2,
        "sync_density": 0.75,
    }


def test_every_name_of_rollout_sync_has_a_transport_and_its_traits() -> None:
    names = get_args(get_type_hints(Rollout)["sync"])
    assert {*names} == TRANSPORTS.keys() == TRANSPORT_TRAITS.keys()

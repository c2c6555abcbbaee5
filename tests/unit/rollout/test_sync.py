"""A push of two ranks against a server that refuses a step: no version advances, no rank hangs."""

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megavlm.models.common.mapping import ROWS, gated, same, shard_tensor
from megavlm.parallel.mesh import Layout
from megavlm.rollout.errors import WeightSyncError
from megavlm.rollout.fleet.targets import Target
from megavlm.rollout.weights.fixed_targets import FixedTargets
from megavlm.rollout.weights.plan import Plan, TrainerRanks
from megavlm.rollout.weights.sync import WeightSync
from megavlm.rollout.weights.transports import disk
from megavlm.rollout.weights.transports.disk import DiskTransport
from megavlm.rollout.weights.transports.tensor import TensorTransport
from tests.distributed.fork import launch
from tests.fakes.server import FakeServer

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


def pushes(url: str, versions: tuple[int, ...], full: bool, folder: Path | None) -> dict[str, Any]:
    targets = None
    if dist.get_rank() == 0:
        targets = FixedTargets([Target(url, 1, "cuda", full, "reads", "writes")])
    size = dist.get_world_size()
    sync = WeightSync(
        Plan(ENTRIES, TrainerRanks(Layout(tensor=size), size), frozenset({1, 2, 3})),
        [Model()],  # type: ignore[list-item]  # of a MegatronModule only what a push needs
        targets=targets,
        transport=TensorTransport() if folder is None else DiskTransport(folder),
        dtype=torch.float32,
        bucket_bytes=100,
    )
    errors, report = [], None
    for version in versions:
        try:
            report = sync.push(version)
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
        "/begin_weight_update",
        "/end_weight_update",
        VERSION,
        "/model_info",
        "/continue_generation",
    ]
    assert keys[UPDATE] == "Bearer writes" and keys["/model_info"] == "Bearer reads"
    assert results[0] == results[1] and results[0]["version"] == 5
    assert results[0]["report"].tensors == len(expected)


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
            assert "weight version 4 was not pushed" in error and path in error
            assert "refused as told" in error
        fake.refused.clear()
        results = launch(2, pushes, fake.url, (5,), False, None)
        assert [result["version"] for result in results] == [5, 5] and fake.weight_version == "5"


def test_server_that_does_not_take_the_version() -> None:
    with FakeServer() as fake:
        fake.deaf = True
        results = launch(2, pushes, fake.url, (4,), False, None)
    for result in results:
        assert "says its weights are version '1'" in result["errors"][0]


def test_no_server() -> None:
    with FakeServer() as fake:
        pass
    (result,) = launch(1, pushes, fake.url, (4,), False, None)
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
        assert "weight version 4 was not pushed" in error and f"{folder} cannot be written" in error


def pushes_that_cannot_rename(*arguments: Any) -> dict[str, Any]:
    def refuse(source: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied", str(to))

    disk.os.rename = refuse  # type: ignore[attr-defined]
    return pushes(*arguments)

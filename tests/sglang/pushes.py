"""A push as the trainer does it: two ranks with tensor parallelism, to a real server."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.registry import build_model, family
from megavlm.parallel.mesh import build_mesh
from megavlm.rollout.server import free_port
from megavlm.rollout.weights.servers import Servers
from megavlm.rollout.weights.sync import SyncReport, WeightSync
from megavlm.rollout.weights.transports.base import Transport
from megavlm.rollout.weights.transports.disk import DiskTransport
from megavlm.rollout.weights.transports.distributed import DistributedTransport
from megavlm.rollout.weights.transports.tensor import TensorTransport


@dataclass(frozen=True)
class Target:
    url: str
    api_key: str
    admin_key: str


def transport(kind: str, servers: Servers, folder: Path) -> Transport:
    if kind == "disk":
        return DiskTransport(servers, folder)
    if kind == "tensor":
        return TensorTransport(servers)
    return DistributedTransport(
        servers, backend="gloo", address="127.0.0.1", port=free_port(), timeout=60
    )


def push(
    target: Target, kind: str, weights: Path, scratch: Path, version: int, freeze_tower: bool
) -> SyncReport:
    """On each of two ranks. Small portions, so that there are several."""
    mesh = build_mesh(tensor=2)
    config = AutoConfig.from_pretrained(weights)
    model = build_model(
        config, mesh, dtype=torch.float32, freeze_tower=freeze_tower, freeze_merger=freeze_tower
    )
    entries = family(config.model_type).mapping(config)
    load_hf(model, entries, HFFolder(weights), mesh.tensor_rank, mesh.tensor_size)
    servers = way = None
    if mesh.is_driver:
        servers = Servers([target.url], api_key=target.api_key, admin_key=target.admin_key)
        way = transport(kind, servers, scratch)
    sync = WeightSync(
        entries,
        model,
        tp_group=mesh.groups.tp,
        servers=servers,
        transport=way,
        dtype=torch.float32,
        objects=mesh.objects,
        portion_bytes=2**19,
    )
    report = sync.push(version)
    assert sync.version == version
    if way is not None:
        way.close()
    return report


def changed(folder: Path, to: Path, *, tower: bool, seed: int) -> Path:
    """The folder with noise on its language model, and on its tower if asked."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        if tower or "visual" not in name:
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator)
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to

"""How a run's weights reach its rollout servers."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megavlm.config.schema import Config
from megavlm.inference.server import HOST
from megavlm.inference.server_pool.targets import Targets
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh
from megavlm.weight_sync.lora import Adapters
from megavlm.weight_sync.plan import Plan, TrainerRanks
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport


def weight_sync(
    config: Config,
    mesh: Mesh,
    hf_config: Any,
    entries: Sequence[Entry],
    model: Sequence[VisionLanguageModel],
    targets: Targets | None,
) -> WeightSync:
    """Made by all ranks together; `targets`: the servers, on the driver."""
    text = hf_config.text_config
    options, settings = ModelOptions.from_config(config), config.lora
    trainer = TrainerRanks.of(hf_config, mesh.layout, mesh.world_size, options)
    changed = trained_entries(entries, options, settings.targets if settings.rank else None)
    adapters = None
    if settings.rank and config.rollout.lora == "adapter":
        changed = frozenset()  # beside adapters nothing is trained
        adapters = Adapters.of(entries, settings, trainer, model, text.num_key_value_heads)
    plan = Plan(entries, trainer, changed)
    return WeightSync(
        plan,
        model,
        targets=targets,
        transport=transport(config),
        dtype=getattr(torch, config.model.dtype),
        num_kv_heads=text.num_key_value_heads,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        adapters=adapters,
        pause=config.rollout.pause,
        timeout=config.rollout.request_timeout,
        objects=mesh.objects,
    )


def transport(config: Config) -> Transport:
    """This rank's."""
    rollout = config.rollout
    if rollout.sync == "disk":
        return DiskTransport(Path(config.run.dir) / "sync")
    if rollout.sync == "distributed":
        return DistributedTransport(
            backend=platform.backend(),
            address=HOST if rollout.mode == "managed" else socket.gethostname(),
            timeout=rollout.request_timeout,
        )
    return TensorTransport()

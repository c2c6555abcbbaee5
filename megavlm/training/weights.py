"""How a run's weights reach its rollout servers."""

import socket
from pathlib import Path

import torch

from megavlm.config.schema import Config
from megavlm.parallel import platform
from megavlm.rollout.fleet.targets import Targets
from megavlm.rollout.server import HOST
from megavlm.rollout.weights.plan import Plan, TrainerRanks
from megavlm.rollout.weights.sync import WeightSync
from megavlm.rollout.weights.trained import trained_entries
from megavlm.rollout.weights.transports.base import Transport
from megavlm.rollout.weights.transports.disk import DiskTransport
from megavlm.rollout.weights.transports.distributed import DistributedTransport
from megavlm.rollout.weights.transports.tensor import TensorTransport
from megavlm.training.options import model_options
from megavlm.training.session import Session


def weight_sync(session: Session, targets: Targets | None) -> WeightSync:
    """Made by all ranks together; `targets`: the servers, on the driver."""
    config, mesh, text = session.config, session.mesh, session.hf_config.text_config
    options = model_options(config)
    adapted = config.lora.targets if config.lora.rank else None
    trainer = TrainerRanks.of(session.hf_config, mesh.layout, mesh.world_size, options)
    plan = Plan(session.entries, trainer, trained_entries(session.entries, options, adapted))
    return WeightSync(
        plan,
        session.model,
        targets=targets,
        transport=transport(config),
        dtype=getattr(torch, config.model.dtype),
        num_kv_heads=text.num_key_value_heads,
        tied_embeddings=bool(session.hf_config.tie_word_embeddings),
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

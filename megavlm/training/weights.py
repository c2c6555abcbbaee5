"""How a run's weights reach its rollout servers."""

import socket
from pathlib import Path
from typing import Any

import torch

from megavlm.config.schema import Config
from megavlm.parallel import platform
from megavlm.rollout.fleet.targets import Targets
from megavlm.rollout.server import HOST
from megavlm.rollout.weights.adapters import Adapters
from megavlm.rollout.weights.plan import Plan, TrainerRanks
from megavlm.rollout.weights.sync import WeightSync
from megavlm.rollout.weights.trained import trained_entries
from megavlm.rollout.weights.transports.base import Transport
from megavlm.rollout.weights.transports.disk import DiskTransport
from megavlm.rollout.weights.transports.distributed import DistributedTransport
from megavlm.rollout.weights.transports.tensor import TensorTransport
from megavlm.training.options import lora, model_options
from megavlm.training.session import Session


def weight_sync(session: Session, targets: Targets | None) -> WeightSync:
    """Made by all ranks together; `targets`: the servers, on the driver."""
    config, mesh, text = session.config, session.mesh, session.hf_config.text_config
    options, settings, entries = model_options(config), lora(config), session.entries
    trainer = TrainerRanks.of(session.hf_config, mesh.layout, mesh.world_size, options)
    changed = trained_entries(entries, options, settings.targets if settings else None)
    adapters = None
    if settings is not None and config.rollout.lora == "adapter":
        changed = frozenset()  # beside adapters nothing is trained
        adapters = Adapters.of(entries, settings, trainer, session.model, text.num_key_value_heads)
    plan = Plan(entries, trainer, changed)
    return WeightSync(
        plan,
        session.model,
        targets=targets,
        transport=transport(config),
        dtype=getattr(torch, config.model.dtype),
        num_kv_heads=text.num_key_value_heads,
        tied_embeddings=bool(session.hf_config.tie_word_embeddings),
        adapters=adapters,
        pause=config.rollout.pause,
        timeout=config.rollout.request_timeout,
        objects=mesh.objects,
    )


def server_args(config: Config, device: str) -> dict[str, Any]:
    """SGLang's further arguments: what the recipe says over what serving adapters needs, and what
    its way of pausing must have.
    """
    must = {"disable_radix_cache": True} if config.rollout.pause == "in_place" else {}
    if config.rollout.lora == "merged":
        return {**config.rollout.server_args, **must}
    modules = [leaf for target in config.lora.targets for leaf in _MODULES[target]]
    needed: dict[str, Any] = {"enable_lora": True, "max_lora_rank": config.lora.rank}
    if device == "cpu":
        needed["lora_backend"] = "torch_native"
    return {**needed, "lora_target_modules": modules, **config.rollout.server_args, **must}


_MODULES = {
    "language.attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "language.mlp": ("gate_proj", "up_proj", "down_proj"),
}


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

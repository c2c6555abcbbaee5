"""Where the rollout servers of a run go: GPUs, ports and logs."""

import os
from collections.abc import Sequence
from pathlib import Path

from megavlm.config.schema import Config, Rollout
from megavlm.inference.server import ManagedServer, server_ports
from megavlm.inference.server_args import ServerArgs, recipe_args
from megavlm.models.options import trains_tower
from megavlm.parallel import platform

LOG = "rollout_server"


def managed_servers(config: Config, model_folder: str | Path) -> list[ManagedServer]:
    """Not launched yet. ValueError where this machine has not the GPUs."""
    rollout = config.rollout
    count, size = rollout.servers, rollout.tensor_parallel
    device = platform.device().type
    gpus = server_gpus(rollout, platform.num_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    first = rollout.port
    ports = server_ports(count) if first is None else range(first, first + count)
    names = [LOG] if count == 1 else [f"{LOG}_{index}" for index in range(count)]
    return [
        ManagedServer(
            model_folder,
            dtype=config.model.dtype,
            device=device,
            tensor_parallel=size,
            port=ports[index],
            log_path=Path(config.run.dir) / f"{names[index]}.log",
            first_gpu=gpus[index],
            first_core=index * size,
            start_timeout=rollout.start_timeout,
            cache_images=not trains_tower(config),
            server_args={**sharing_args(rollout), **recipe_args(config, device)},
        )
        for index in range(count)
    ]


def sharing_args(rollout: Rollout) -> ServerArgs:
    """What lets a server release its memory and take it back with the weights that it had: their
    copy in host memory saves sending again what training does not change.
    """
    if not rollout.colocate or not platform.has_gpu():
        return {}  # on a CPU there is nothing to release, and SGLang accepts the requests
    return {"enable_memory_saver": True, "enable_weights_cpu_backup": True}


def keeps_weights(rollout: Rollout) -> bool:
    """Whether a server that takes its memory back has the weights that it released."""
    backup = rollout.server_args.get("enable_weights_cpu_backup", True)
    return bool(backup) or not platform.has_gpu()


def server_gpus(rollout: Rollout, num_gpus: int, num_trainers: int) -> Sequence[int]:
    """The first GPU of each server; 0 on a machine without any. num_trainers: ranks that train on
    this machine, on GPUs from 0 on.
    """
    size, needed = rollout.tensor_parallel, rollout.servers * rollout.tensor_parallel
    if num_gpus == 0:
        return [0] * rollout.servers
    first = 0 if rollout.colocate else num_trainers
    gpus = rollout.gpus or tuple(range(first, first + needed))
    if max(gpus) >= num_gpus:
        raise ValueError(
            f"rollout.servers={rollout.servers} x rollout.tensor_parallel={size} would take GPUs "
            f"{list(gpus)} of this machine, which has {num_gpus} and trains on {num_trainers}: "
            "lower one, set rollout.gpus, or rollout.colocate=true to share the trainer's"
        )
    if not rollout.colocate and min(gpus) < num_trainers:
        raise ValueError(
            f"rollout.gpus={list(rollout.gpus)} names GPUs of the {num_trainers} trainer ranks: "
            "set rollout.colocate=true to share them, or name others"
        )
    return gpus[::size]

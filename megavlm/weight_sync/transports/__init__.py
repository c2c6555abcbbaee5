"""Transports, by their name in `rollout.sync`."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.inference.server import HOST
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport

TRANSPORTS: Mapping[str, Callable[[Config], Transport]] = {
    "tensor": lambda config: TensorTransport(),
    "distributed": lambda config: DistributedTransport(
        HOST if config.rollout.mode == "managed" else socket.gethostname(),
        timeout=config.rollout.request_timeout,
    ),
    "disk": lambda config: DiskTransport(Path(config.run.dir) / "sync"),
}

"""Transports, by their name in `rollout.sync`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.chain import ChainTransport, store_url
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport

TRANSPORTS: Mapping[str, Callable[[Config], Transport]] = {
    "tensor": lambda config: TensorTransport(timeout=config.rollout.request_timeout),
    "distributed": lambda config: DistributedTransport(timeout=config.rollout.request_timeout),
    "store": lambda config: ChainTransport(
        store_url(config.run.dir, config.rollout.store),
        str(Path(config.run.dir).resolve()),
        timeout=config.rollout.request_timeout,
    ),
    "disk": lambda config: DiskTransport(Path(config.run.dir) / "sync"),
}

"""Transport through a folder that the sending trainer ranks and all servers share."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import TrainerFault
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import hub_tensors
from megavlm.weight_sync.transports.base import Delivery
from megavlm.weight_sync.update import SyncAttempt, TensorBucket

PARTIAL, READY = "partial", "ready"
CHANGED, REST = "changed", "rest"


class DiskTransport:
    """Writes safetensors to `folder` and has the servers load them.

    The folder gets the name that servers read only when it is complete. It holds the tensors of one
    attempt and is kept until the next attempt, because SGLang 0.5.23 answers when its first rank
    has loaded, while other ranks may still be reading.
    """

    traits = TRANSPORT_TRAITS["disk"]

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._owns_folder = False  # True on rank 0, because it creates and removes the folder

    def open(self, servers: Servers, attempt: SyncAttempt) -> Delivery:
        if dist.get_rank() == 0:
            self._owns_folder = True
            self._remove()
            with _writing(self.folder):
                for name in (CHANGED, REST):
                    (self.folder / PARTIAL / name).mkdir(parents=True)
        return DiskDelivery(self.folder, servers, attempt)

    def close(self) -> None:
        if self._owns_folder:
            self._remove()

    def _remove(self) -> None:
        for name in (PARTIAL, READY):
            shutil.rmtree(self.folder / name, ignore_errors=True)


class DiskDelivery(Delivery):
    def __init__(self, folder: Path, servers: Servers, attempt: SyncAttempt) -> None:
        self._folder, self._servers, self._attempt = folder, servers, attempt
        self._parts = 0

    def send(self, bucket: TensorBucket) -> int:
        folder = self._folder / PARTIAL / (CHANGED if bucket.changed else REST)
        path = folder / f"model-{dist.get_rank():04d}-{self._parts:05d}.safetensors"
        tensors = {name: tensor.contiguous().cpu() for name, tensor in hub_tensors(bucket.tensors)}
        with _writing(self._folder):
            save_file(tensors, path)
        self._parts += 1
        return sum(tensor.nbytes for tensor in tensors.values())

    def complete(self) -> None:
        ready, attempt = self._folder / READY, self._attempt
        with _writing(self._folder):
            os.rename(self._folder / PARTIAL, ready)
            filled = {name: any((ready / name).iterdir()) for name in (CHANGED, REST)}
        for name, urls in ((CHANGED, attempt.urls), (REST, attempt.refitted)):
            if filled[name]:
                body = {
                    "model_path": str((ready / name).resolve()),
                    "load_format": "safetensors",
                    "flush_cache": False,
                }
                self._servers.request_each("/update_weights_from_disk", dict.fromkeys(urls, body))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        # The attempt has failed, and its files may be the ones that fill the disk.
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        raise TrainerFault(f"{folder} cannot be written: {error}") from error

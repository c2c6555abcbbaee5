"""Through a folder that all trainer ranks that send, and all servers, share."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megavlm.inference.errors import TrainerFault
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine
from megavlm.weight_sync.transports.base import Load

PARTIAL, READY = "partial", "ready"
CHANGED, REST = "changed", "rest"


class DiskTransport:
    """Writes safetensors to `folder` and has the servers load them.

    Servers see the folder only under its final name, when it is complete; it holds one push, and is
    there until the next one: SGLang 0.5.23 answers when its first rank has loaded, and the others
    may not have looked yet.
    """

    by_stage = True
    in_session = False
    together = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._parts = 0
        self._is_first = False  # of the ranks: it alone prepares

    def prepare(self) -> None:
        self._is_first = True
        self._remove()
        with self._writing():
            for name in (CHANGED, REST):
                (self.folder / PARTIAL / name).mkdir(parents=True)

    def open(self, servers: Servers, engines: Mapping[str, Engine]) -> None:
        self._parts = 0

    def send(self, load: Load) -> int:
        folder = self.folder / PARTIAL / (CHANGED if load.changed else REST)
        path = folder / f"model-{dist.get_rank():04d}-{self._parts:05d}.safetensors"
        tensors = {name: tensor.contiguous().cpu() for name, tensor in load.tensors}
        with self._writing():
            save_file(tensors, path)
        self._parts += 1
        return sum(tensor.nbytes for tensor in tensors.values())

    def commit(self, servers: Servers, refitted: Sequence[str]) -> None:
        with self._writing():
            os.rename(self.folder / PARTIAL, self.folder / READY)
            filled = {name: any((self.folder / READY / name).iterdir()) for name in (CHANGED, REST)}
        everyone = [target.url for target in servers.live]
        for name, urls in ((CHANGED, everyone), (REST, refitted)):
            folder = (self.folder / READY / name).resolve()
            if filled[name]:
                body = {
                    "model_path": str(folder),
                    "load_format": "safetensors",
                    "flush_cache": False,
                }
                servers.post_each("/update_weights_from_disk", dict.fromkeys(urls, body))

    def abort(self, servers: Servers) -> None:
        self._remove()

    def close(self) -> None:
        if self._is_first:
            self._remove()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise TrainerFault(f"{self.folder} cannot be written: {error}") from error

    def _remove(self) -> None:
        for name in (PARTIAL, READY):
            shutil.rmtree(self.folder / name, ignore_errors=True)

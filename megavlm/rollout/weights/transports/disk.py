"""Through a folder that trainer and servers share."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megavlm.rollout.weights.servers import Servers

PARTIAL, READY = "partial", "ready"


class DiskTransport:
    """Writes safetensors to `folder` and has every server load them.

    Servers see the folder only under its final name, when it is complete; it holds one push.
    """

    def __init__(self, servers: Servers, folder: str | Path) -> None:
        self.servers = servers
        self.folder = Path(folder)
        self._parts = 0

    def begin(self) -> None:
        self._remove()
        (self.folder / PARTIAL).mkdir(parents=True)
        self._parts = 0

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        path = self.folder / PARTIAL / f"model-{self._parts:05d}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, path)
        self._parts += 1
        return path.stat().st_size

    def commit(self) -> None:
        os.rename(self.folder / PARTIAL, self.folder / READY)
        self.servers.post(
            "/update_weights_from_disk",
            {"model_path": str((self.folder / READY).resolve()), "load_format": "safetensors"},
        )
        self._remove()

    def abort(self) -> None:
        self._remove()

    def close(self) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (PARTIAL, READY):
            shutil.rmtree(self.folder / name, ignore_errors=True)

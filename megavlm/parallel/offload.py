"""Memory of a device that moves to the host and comes back bit for bit.

A tensor's storage is emptied and filled in place, so that every view of it (parameters in a
gradient buffer, shards of an optimizer) stays valid. The same on a GPU and on a CPU.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megavlm.parallel import platform


class Offloadable:
    """A set of tensors whose memory moves to the host and back.

    `tensors` is called each time that they leave. keep: their contents come back; else they are
    undefined afterwards.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True) -> None:
        self._tensors, self._keep = tensors, keep
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def to_host(self) -> None:
        assert not self._away, "it is on the host already"
        for storage in distinct_storages(self._tensors()):
            host = None
            if self._keep:
                whole = _bytes(storage)
                host = torch.empty_like(whole, device="cpu", pin_memory=platform.has_gpu())
                host.copy_(whole)
            self._away.append((storage, storage.nbytes(), host))
            # torch pins the size of what numpy has seen, which is host memory already.
            if storage.resizable():
                storage.resize_(0)

    def to_device(self) -> None:
        for storage, size, host in self._away:
            if storage.resizable():
                storage.resize_(size)
            if host is not None:
                _bytes(storage).copy_(host)
        self._away = []


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty ones."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

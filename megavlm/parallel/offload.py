"""Moves device memory to the host and back, bit for bit.

A tensor's storage is emptied and refilled in place, so that every view of it (parameters in a
gradient buffer, shards of an optimizer) stays valid. This works in the same way on GPU and CPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megavlm.parallel import platform

# Bytes in a block of host memory. torch's allocator of pinned memory rounds each request up to a
# power of two, and would waste up to half of a large one.
BLOCK_BYTES = 2**28
ALIGNMENT = 16  # tensors start at multiples of this many bytes, which suits every dtype


class HostCopy:
    """Host memory for a copy of contiguous tensors. It is allocated once, and pinned on a machine
    with a GPU: pinning is slow, and pinned memory is copied asynchronously at the speed of the
    link.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._blocks: list[Tensor] = []
        self.hold(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Make this the copy of other tensors. Only memory that is missing is allocated."""
        self._tensors = tensors
        needed = sum(x.nbytes + -x.nbytes % ALIGNMENT for x in tensors)
        if needed > sum(map(len, self._blocks)):
            if self._blocks and len(self._blocks[-1]) < BLOCK_BYTES:
                self._blocks.pop()  # places are counted in full blocks
            left = needed - BLOCK_BYTES * len(self._blocks)
            for start in range(0, left, BLOCK_BYTES):
                size = min(left - start, BLOCK_BYTES)
                block = torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_gpu())
                self._blocks.append(block)

    def save(self) -> None:
        """Copy the tensors to the host."""
        for part, host in self._parts():
            host.copy_(part, non_blocking=True)

    def load(self) -> None:
        """Copy the saved values back to the tensors."""
        for part, host in self._parts():
            part.copy_(host, non_blocking=True)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of each tensor that lie within one block, with their place in it."""
        place = 0
        for tensor in self._tensors:
            rest = tensor.detach().view(-1)
            while len(rest):
                block, start = divmod(place, BLOCK_BYTES)
                count = min(len(rest), (BLOCK_BYTES - start) // rest.element_size())
                part, rest = rest[:count], rest[count:]
                yield part, self._blocks[block][start : start + part.nbytes].view(part.dtype)
                place += part.nbytes
            place += -place % ALIGNMENT


class Offloadable:
    """A set of tensors whose memory moves to the host and back. Copies are only queued; the memory
    on the host is kept for the next time.

    tensors: Returns the tensors. It is called each time they move to the host.
    keep: True if their contents are restored; otherwise the contents are undefined afterwards.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True) -> None:
        self._tensors, self._keep = tensors, keep
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host = HostCopy()

    def to_host(self) -> None:
        assert not self._away, "it is on the host already"
        storages = distinct_storages(self._tensors())
        self._away = [(storage, storage.nbytes()) for storage in storages]
        if self._keep:
            self._host.hold([_bytes(storage) for storage in storages])
            self._host.save()
        for storage in storages:
            # A storage that was shared with numpy cannot be resized; it is in host memory anyway.
            if storage.resizable():
                storage.resize_(0)

    def to_device(self) -> None:
        for storage, size in self._away:
            if storage.resizable():
                storage.resize_(size)
        self._host.load()
        self._host.hold(())  # or it would keep tensors alive that the optimizer has dropped
        self._away = []


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of tensors that are not empty."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

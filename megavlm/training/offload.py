"""Parts of a trainer's memory that go to the host and come back, bit for bit.

A tensor's storage is emptied and filled again in place, so that every view of it (parameters in a
gradient buffer, an optimizer's shards) stays what it is. The same on a GPU and on a CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megavlm.parallel import platform
from megavlm.training.optimizer import Updater

Tensors = Callable[[], Iterable[Tensor]]


class Part:
    """`tensors`: what it is made of, asked each time that it leaves. keep: whether its contents
    come back; else they are undefined then.
    """

    def __init__(self, tensors: Tensors, *, keep: bool = True) -> None:
        self._tensors, self._keep = tensors, keep
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def to_host(self) -> None:
        assert not self._away, "it is there already"
        for storage in distinct(self._tensors()):
            host = None
            if self._keep:
                whole = _bytes(storage)
                host = torch.empty_like(whole, device="cpu", pin_memory=platform.has_gpu())
                host.copy_(whole)
            self._away.append((storage, storage.nbytes(), host))
            # torch pins the size of what numpy has seen, which is memory of the host already.
            if storage.resizable():
                storage.resize_(0)

    def to_device(self) -> None:
        for storage, size, host in self._away:
            if storage.resizable():
                storage.resize_(size)
            if host is not None:
                _bytes(storage).copy_(host)
        self._away = []


def trainer_parts(updater: Updater, prefix: str = "") -> dict[str, Part]:
    """parameters, frozen ones too; gradients, which each update starts from zero; optimizer: names
    that begin with `prefix`.
    """
    chunks = updater.chunks

    def parameters() -> Iterator[Tensor]:
        for chunk in chunks:
            yield from chunk.parameters()

    def gradients() -> Iterator[Tensor]:
        for chunk in chunks:
            yield from (buffer.grad_data for buffer in _buffers(chunk))

    def optimizer() -> Iterator[Tensor]:
        """Its own tensors: in fp32 its parameters are views of the model's."""
        shared = {storage.data_ptr() for storage in distinct(parameters())}
        for part in updater.optimizer.chained_optimizers:
            if part.optimizer is None:
                continue  # without parameters there is none
            groups = (p for group in part.optimizer.param_groups for p in group["params"])
            states = (x for state in part.optimizer.state.values() for x in state.values())
            for tensor in (*groups, *states):
                if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in shared:
                    yield tensor

    return {
        f"{prefix}parameters": Part(parameters),
        f"{prefix}gradients": Part(gradients, keep=False),
        f"{prefix}optimizer": Part(optimizer),
    }


def distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once; empty ones are none."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""GPUs that trainer and servers share: which memory is resident in training, during a weight push
and while the servers generate.

A part of the trainer's memory goes to the host and comes back bit for bit. A tensor's storage is
emptied and filled in place, so that every view of it (parameters in a gradient buffer, shards of an
optimizer) stays valid. The same on a GPU and on a CPU.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megavlm.inference.server_pool.memory import ServerMemory
from megavlm.parallel import platform
from megavlm.parallel.collectives import barrier
from megavlm.parallel.mesh import Mesh
from megavlm.training.optimizer import Updater

MemoryPhase = Literal["train", "push", "generate"]
CRITIC = ("critic_parameters", "critic_gradients", "critic_optimizer")  # of a separate critic
# The trainer's parts, and the servers' by SGLang's tags, in the order in which they are loaded.
RESIDENT: dict[MemoryPhase, tuple[str, ...]] = {
    "train": ("parameters", "gradients", "optimizer", *CRITIC),
    "push": ("parameters", "weights"),
    "generate": ("weights", "kv_cache"),
}


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


def trainer_memory(updater: Updater, prefix: str = "") -> dict[str, Offloadable]:
    """Return a model's parameters (frozen ones too), gradients (each update starts from zero) and
    optimizer state, under names that begin with `prefix`.
    """
    chunks = updater.chunks

    def parameters() -> Iterator[Tensor]:
        for chunk in chunks:
            yield from chunk.parameters()

    def gradients() -> Iterator[Tensor]:
        for chunk in chunks:
            yield from (buffer.grad_data for buffer in _buffers(chunk))

    def optimizer() -> Iterator[Tensor]:
        # In fp32 the optimizer's parameters are views of the model's.
        shared = {storage.data_ptr() for storage in distinct_storages(parameters())}
        for part in updater.optimizer.chained_optimizers:
            if part.optimizer is None:
                continue  # it has no parameters
            groups = (p for group in part.optimizer.param_groups for p in group["params"])
            states = (x for state in part.optimizer.state.values() for x in state.values())
            for tensor in (*groups, *states):
                if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in shared:
                    yield tensor

    return {
        f"{prefix}parameters": Offloadable(parameters),
        f"{prefix}gradients": Offloadable(gradients, keep=False),
        f"{prefix}optimizer": Offloadable(optimizer),
    }


class SharedMemory:
    """Switches shared GPUs between trainer and servers.

    Starts in training, with the servers' memory released. `servers`: on the driver. Every method is
    collective.
    """

    def __init__(
        self, trainer: Mapping[str, Offloadable], servers: ServerMemory | None, mesh: Mesh
    ) -> None:
        self._trainer, self._servers, self._mesh = trainer, servers, mesh
        self._phase: MemoryPhase = "train"

    def switch(self, phase: MemoryPhase) -> None:
        """Release what `phase` does not need on every rank, then load what it needs."""
        now, then = self._resident(self._phase), self._resident(phase)
        if now == then:
            return
        leaving = [name for name in reversed(now) if name not in then]
        coming = [name for name in then if name not in now]
        if self._servers is not None:
            self._servers.release([name for name in leaving if name not in self._trainer])
        for name in leaving:
            if name in self._trainer:
                self._trainer[name].to_host()
        platform.free_cached_memory()
        self._wait_for_all()
        if self._servers is not None:
            self._servers.resume(
                [name for name in coming if name not in self._trainer], starts=phase == "generate"
            )
        for name in coming:
            if name in self._trainer:
                self._trainer[name].to_device()
        self._wait_for_all()
        self._phase = phase

    def _resident(self, phase: MemoryPhase) -> list[str]:
        return [name for name in RESIDENT[phase] if name not in CRITIC or name in self._trainer]

    def _wait_for_all(self) -> None:
        platform.synchronize()
        barrier(self._mesh)


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without empty ones."""
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

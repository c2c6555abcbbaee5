"""GPUs that trainer and servers share: which memory is resident in training, during a weight push
and while the servers generate.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megavlm.inference.server_pool.memory import TAGS, ServerMemory
from megavlm.parallel import platform
from megavlm.parallel.collectives import barrier
from megavlm.parallel.mesh import Mesh
from megavlm.parallel.offload import Offloadable
from megavlm.training.optimizer import Updater

MemoryPhase = Literal["train", "push", "generate"]
CRITIC = ("critic_parameters", "critic_gradients", "critic_optimizer")  # parts of a separate critic
# Memory resident in each phase, in loading order: the trainer's parts by our names, the servers' by
# SGLang's memory tags.
RESIDENT: dict[MemoryPhase, tuple[str, ...]] = {
    "train": ("parameters", "gradients", "optimizer", *CRITIC),
    "push": ("parameters", "weights"),
    "generate": TAGS,
}


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

    return {
        f"{prefix}parameters": Offloadable(parameters),
        f"{prefix}gradients": Offloadable(gradients, keep=False),
        f"{prefix}optimizer": Offloadable(updater.state_tensors),
    }


class SharedMemory:
    """Switches shared GPUs between trainer and servers.

    It starts in the training phase, with the servers' memory released. servers: The servers'
    memory, on the driver only. keeps_weights: True if servers still have their weights after they
    released them. Every method is collective.
    """

    def __init__(
        self,
        trainer: Mapping[str, Offloadable],
        servers: ServerMemory | None,
        mesh: Mesh,
        *,
        keeps_weights: bool,
    ) -> None:
        self._trainer, self._servers, self._mesh = trainer, servers, mesh
        self._keeps_weights = keeps_weights
        self._phase: MemoryPhase = "train"

    @property
    def needs_push(self) -> bool:
        """True if the servers lack weights until the next push."""
        return not self._keeps_weights and "weights" not in RESIDENT[self._phase]

    def switch(self, phase: MemoryPhase) -> None:
        """Release what `phase` does not need on every rank, then load what it needs."""
        now, then = self._resident(self._phase), self._resident(phase)
        if now == then:
            return
        # All ranks release before any loads: the peak never holds both phases.
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


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]

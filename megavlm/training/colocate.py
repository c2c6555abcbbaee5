"""GPUs that trainer and servers take turns on: what lies on them in training, while weights are
pushed, and while the servers generate.
"""

from collections.abc import Mapping
from typing import Literal

from megavlm.inference.server_pool.memory import ServerMemory
from megavlm.parallel import platform
from megavlm.parallel.collectives import barrier
from megavlm.parallel.mesh import Mesh
from megavlm.training.offload import Part

Phase = Literal["train", "push", "generate"]
CRITIC = ("critic_parameters", "critic_gradients", "critic_optimizer")  # of its own
# The trainer's parts, and the servers' by SGLang's tags, in the order in which they are taken.
RESIDENT: dict[Phase, tuple[str, ...]] = {
    "train": ("parameters", "gradients", "optimizer", *CRITIC),
    "push": ("parameters", "weights"),
    "generate": ("weights", "kv_cache"),
}


class Sharing:
    """Begins in training, with the servers' memory released. Every method is collective."""

    def __init__(self, parts: Mapping[str, Part], servers: ServerMemory | None, mesh: Mesh) -> None:
        """`servers`: on the driver."""
        self._parts, self._servers, self._mesh = parts, servers, mesh
        self._phase: Phase = "train"

    def move(self, phase: Phase) -> None:
        """What the new phase does without leaves on every rank before anything comes."""
        now, then = self._resident(self._phase), self._resident(phase)
        if now == then:
            return
        leaving = [name for name in reversed(now) if name not in then]
        coming = [name for name in then if name not in now]
        if self._servers is not None:
            self._servers.release([name for name in leaving if name not in self._parts])
        for name in leaving:
            if name in self._parts:
                self._parts[name].to_host()
        platform.free_cached_memory()
        self._wait_for_all()
        if self._servers is not None:
            self._servers.resume(
                [name for name in coming if name not in self._parts], starts=phase == "generate"
            )
        for name in coming:
            if name in self._parts:
                self._parts[name].to_device()
        self._wait_for_all()
        self._phase = phase

    def _resident(self, phase: Phase) -> list[str]:
        return [name for name in RESIDENT[phase] if name not in CRITIC or name in self._parts]

    def _wait_for_all(self) -> None:
        platform.synchronize()
        barrier(self._mesh)

"""The reference policy, in place of the current one for a pass: the weights that the run started
from, or the model without the adapters that are trained.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from megavlm.models.common.lora import adapters, adapters_disabled
from megavlm.parallel import platform
from megavlm.parallel.collectives import any_rank

# Bytes of a block of host memory. torch's allocator of pinned memory rounds each request up to a
# power of two, which would waste up to half of a large one.
BLOCK_BYTES = 2**28
ALIGNMENT = 16  # bytes at whose multiples a parameter starts, enough for every dtype


class HostCopy:
    """Room in host memory for the values of parameters, allocated once; pinned on a machine with a
    GPU, where copies run at the speed of the link and without waiting for one another.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        left = sum(p.nbytes + -p.nbytes % ALIGNMENT for p in parameters)
        self._blocks: list[Tensor] = []
        while left > 0:
            size = min(left, BLOCK_BYTES)
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_gpu()))
            left -= size

    def save(self) -> None:
        """Copy the parameters to the host."""
        for part, host in self._parts():
            host.copy_(part, non_blocking=True)

    def load(self) -> None:
        """Copy what was saved into the parameters."""
        for part, host in self._parts():
            part.copy_(host, non_blocking=True)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of each parameter that lie within one block, and their place there."""
        place = 0
        for parameter in self._parameters:
            rest = parameter.detach().view(-1)
            while len(rest):
                block, start = divmod(place, BLOCK_BYTES)
                count = min(len(rest), (BLOCK_BYTES - start) // rest.element_size())
                part, rest = rest[:count], rest[count:]
                yield part, self._blocks[block][start : start + part.nbytes].view(part.dtype)
                place += part.nbytes
            place += -place % ALIGNMENT


class ReferenceWeights:
    """A copy of the trainable parameters in host memory, and room for the policy's while they are
    in its place; frozen parameters are shared with the policy.
    """

    is_policy = True  # before the first update

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        self._reference, self._policy = HostCopy(trained), HostCopy(trained)
        self._reference.save()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model the reference within the context; afterwards it is bit for bit the policy
        again.
        """
        self._policy.save()
        self._reference.load()
        try:
            yield
        finally:
            self._policy.load()


class WithoutAdapters:
    """The model with its adapters disabled: no second copy of the weights.

    is_policy: the adapters are fresh, so that they change nothing before the first update.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Look at the adapters. Collective."""
        self._chunks = chunks
        found = [adapter for chunk in chunks for _, adapter in adapters(chunk)]
        learnt = any(bool(b.any()) for adapter in found for b in adapter.lora_B.values())
        self.is_policy = not any_rank(learnt)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(adapters_disabled(chunk))
            yield


def reference(chunks: Sequence[nn.Module]) -> ReferenceWeights | WithoutAdapters:
    """Return the reference of a model, before its first update. Collective."""
    has_adapters = any_rank(any(True for chunk in chunks for _ in adapters(chunk)))
    return WithoutAdapters(chunks) if has_adapters else ReferenceWeights(chunks)

"""The reference policy, in place of the current one for a pass: the weights that the run started
from, or the model without the adapters that are trained.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from megavlm.models.common.lora import adapters, adapters_disabled
from megavlm.parallel.collectives import any_rank
from megavlm.parallel.offload import HostCopy


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

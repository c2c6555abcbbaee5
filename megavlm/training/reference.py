"""The reference policy: the weights that the run started from, or the model without its trained
LoRA adapters. It is swapped in for a forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from megavlm.models.common.lora import adapters, adapters_disabled
from megavlm.parallel.collectives import any_rank
from megavlm.parallel.offload import HostCopy


class ReferenceWeights:
    """A copy of the trainable parameters in host memory, with space for the policy's parameters
    while the reference is swapped in. Frozen parameters are shared with the policy.
    """

    is_policy = True  # until the first update

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        self._reference, self._policy = HostCopy(trained), HostCopy(trained)
        self._reference.save()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Load the reference's weights within the context; afterwards the model is bit for bit the
        policy again.
        """
        self._policy.save()
        self._reference.load()
        try:
            yield
        finally:
            self._policy.load()


class WithoutAdapters:
    """The model with its adapters disabled. It needs no second copy of the weights.

    is_policy: True if the adapters are new: until the first update they change nothing.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Find out whether the adapters have been trained. Collective."""
        self._chunks = chunks
        found = [adapter for chunk in chunks for _, adapter in adapters(chunk)]
        learnt = any(bool(b.any()) for adapter in found for _, _, b in adapter.pairs())
        self.is_policy = not any_rank(learnt)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(adapters_disabled(chunk))
            yield


def reference(chunks: Sequence[nn.Module]) -> ReferenceWeights | WithoutAdapters:
    """Return the reference of a model; call it before the first update. Collective."""
    has_adapters = any_rank(any(True for chunk in chunks for _ in adapters(chunk)))
    return WithoutAdapters(chunks) if has_adapters else ReferenceWeights(chunks)

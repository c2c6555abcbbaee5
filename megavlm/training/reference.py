"""The reference policy: the model that a run starts from. It is swapped in for a forward pass."""

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
    """The model with its adapters disabled, for a run whose adapters started as new ones, which
    change nothing. It needs no second copy of the weights.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(adapters_disabled(chunk))
            yield


def reference(chunks: Sequence[nn.Module]) -> ReferenceWeights | WithoutAdapters:
    """Return the reference of a model; call it before the first update and before a resume.
    Collective.
    """
    found = [adapter for chunk in chunks for _, adapter in adapters(chunk)]
    trained = any(bool(b.any()) for adapter in found for _, _, b in adapter.pairs())
    # Ranks must agree: a layer with disabled adapters leaves out their communication.
    is_new = any_rank(bool(found)) and not any_rank(trained)
    return WithoutAdapters(chunks) if is_new else ReferenceWeights(chunks)

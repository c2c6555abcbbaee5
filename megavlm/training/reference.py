"""The reference policy, in place of the current one for a pass: the weights that the run started
from, or the model without the adapters that are trained.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from megavlm.models.common.lora import adapters, adapters_disabled


class ReferenceWeights:
    """A copy of the trainable parameters in host memory; frozen ones are shared with the policy."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._pairs = [
            (p, p.detach().to("cpu", copy=True))
            for chunk in chunks
            for p in chunk.parameters()
            if p.requires_grad
        ]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Make the model the reference within the context; afterwards it is bit for bit the policy
        again.
        """
        current = [parameter.detach().to("cpu", copy=True) for parameter, _ in self._pairs]
        for parameter, reference in self._pairs:
            parameter.copy_(reference)
        try:
            yield
        finally:
            for (parameter, _), policy in zip(self._pairs, current, strict=True):
                parameter.copy_(policy)


class WithoutAdapters:
    """The model with its adapters disabled: no second copy of the weights."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(adapters_disabled(chunk))
            yield


def reference(chunks: Sequence[nn.Module]) -> ReferenceWeights | WithoutAdapters:
    """Return the reference of a model, before its first update."""
    has_adapters = any(True for chunk in chunks for _ in adapters(chunk))
    return WithoutAdapters(chunks) if has_adapters else ReferenceWeights(chunks)

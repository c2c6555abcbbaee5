"""The reference policy: the weights that the run started from, put in place of the current ones for
a pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ReferenceWeights:
    """A copy of the trainable parameters in host memory; frozen ones are shared with the policy."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [
            (p, p.detach().to("cpu", copy=True)) for p in model.parameters() if p.requires_grad
        ]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Within: the model is the reference. After: bit for bit the policy again."""
        current = [parameter.detach().to("cpu", copy=True) for parameter, _ in self._pairs]
        for parameter, reference in self._pairs:
            parameter.copy_(reference)
        try:
            yield
        finally:
            for (parameter, _), policy in zip(self._pairs, current, strict=True):
                parameter.copy_(policy)

"""Many tensors as one: the layout of SGLang's `flattened_bucket`."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor


def flatten(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """All bytes one after the other, uint8 [bytes], and where each tensor lies in them.

    The places have the fields of SGLang's FlattenedTensorMetadata; SimpleNamespace is a type that
    its unpickler admits, so no SGLang is imported here.
    """
    places, start = [], 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        places.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        start = end
    parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]
    return torch.cat(parts), places

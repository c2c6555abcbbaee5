"""Pickles whose tensors are kept apart, so that a whole batch takes one shared buffer.

PyTorch would use a file descriptor for each shared tensor, and the number of file descriptors of a
process is limited.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor


class TensorPickler(pickle.Pickler):
    """Pickler that hands the contents of tensors to a callback."""

    def reducer_override(self, value: Any) -> Any:
        return reduce_tensor(value) if isinstance(value, Tensor) else NotImplemented


def reduce_tensor(value: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Reduce a tensor for pickling (see pickle.Pickler.reducer_override). Its content becomes a
    numpy array; a tensor on the meta device keeps its shape and dtype only.
    """
    if value.is_meta:
        return _empty, (tuple(value.shape), value.dtype)
    return torch.from_numpy, (value.contiguous().numpy(),)


def dumps(
    value: Any, pickler: type[TensorPickler] = TensorPickler
) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of `value` without the contents of arrays, and these contents in order. An
    object that `value` contains twice is pickled once.
    """
    buffers: list[pickle.PickleBuffer] = []
    skeleton = BytesIO()
    pickler(skeleton, protocol=5, buffer_callback=buffers.append).dump(value)
    return skeleton.getvalue(), [buffer.raw() for buffer in buffers]


def parts(memory: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield consecutive parts of `sizes` bytes."""
    start = 0
    for size in sizes:
        yield memory[start : start + size]
        start += size


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

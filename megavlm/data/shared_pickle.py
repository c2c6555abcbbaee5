"""Objects that one process of a run sends to another, with all of their arrays in one file.

PyTorch would use a file descriptor for each shared tensor, and the number of file descriptors of a
process is limited.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from io import BytesIO
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from torch import Tensor


class TensorPickler(pickle.Pickler):
    """Pickler whose buffer callback gets the contents of tensors. A tensor on the meta device keeps
    its shape and dtype only.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.is_meta:
            return _empty, (tuple(value.shape), value.dtype)
        return torch.from_numpy, (value.contiguous().numpy(),)


class SharedPickle:
    """A pickle, and the contents of its arrays in shared memory. A worker puts it into its queue,
    and a process that is no worker sends it. The file has no name, so that nothing is left behind
    when a process dies.
    """

    def __init__(self, skeleton: bytes, sizes: list[int], descriptor: int) -> None:
        """skeleton: The pickle without contents. sizes: Bytes of each content. descriptor: The
        file, which is closed with this object.
        """
        self._skeleton, self._sizes, self._descriptor = skeleton, sizes, descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, value: Any, pickler: type[TensorPickler] = TensorPickler) -> Self:
        """Pickle any object. An object that `value` contains twice is pickled once."""
        buffers: list[pickle.PickleBuffer] = []
        skeleton = BytesIO()
        pickler(skeleton, protocol=5, buffer_callback=buffers.append).dump(value)
        contents = [buffer.raw() for buffer in buffers]
        descriptor = os.memfd_create("megavlm_pickle")
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(contents)
            file.write(b"\0")  # an empty file cannot be mapped
        return cls(skeleton.getvalue(), [content.nbytes for content in contents], descriptor)

    def __reduce__(self) -> tuple[Callable[..., "SharedPickle"], tuple[Any, ...]]:
        return _received, (self._skeleton, self._sizes, reduction.DupFd(self._descriptor))

    def send(self, connection: Connection, pid: int) -> None:
        """Send it to process `pid` at the other end, which calls `receive`."""
        connection.send((self._skeleton, self._sizes))
        reduction.send_handle(connection, self._descriptor, pid)

    @classmethod
    def receive(cls, connection: Connection) -> Self:
        skeleton, sizes = connection.recv()
        return cls(skeleton, sizes, reduction.recv_handle(connection))

    def unpack(self, *, copy: bool = False) -> Any:
        """Return the object. Its arrays are views of the shared memory, which is freed with the
        last of them, or copies.
        """
        memory, buffers, start = memoryview(mmap.mmap(self._descriptor, 0)), [], 0
        for size in self._sizes:
            part = memory[start : start + size]
            buffers.append(bytearray(part) if copy else part)
            start += size
        # Trusted: it comes from a child of this process, through a pipe that only the two have.
        return pickle.loads(self._skeleton, buffers=buffers)  # noqa: S301


def _received(skeleton: bytes, sizes: list[int], duplicate: Any) -> SharedPickle:
    return SharedPickle(skeleton, sizes, duplicate.detach())


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

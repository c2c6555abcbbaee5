"""How a worker process hands objects with many tensors to its parent: one shared buffer for all.

PyTorch would share each tensor by a file descriptor of its own, of which a process has few.
"""

import pickle
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parcel:
    skeleton: bytes  # everything but the tensors' contents
    sizes: list[int]  # bytes of each
    content: Tensor  # [sum of sizes] uint8

    @classmethod
    def pack(cls, value: Any) -> "Parcel":
        """`value`: any picklable object; an object in it that is there twice is packed once."""
        buffers: list[pickle.PickleBuffer] = []
        skeleton = BytesIO()
        _Pickler(skeleton, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [buffer.raw() for buffer in buffers]
        content = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
        flat, start = content.numpy(), 0
        for part in parts:
            flat[start : start + part.nbytes] = part
            start += part.nbytes
        return cls(skeleton.getvalue(), [part.nbytes for part in parts], content)

    def unpack(self) -> Any:
        """The object, with tensors of its own: the shared buffer is free again."""
        flat, start, buffers = self.content.numpy(), 0, []
        for size in self.sizes:
            buffers.append(bytearray(flat[start : start + size]))
            start += size
        # From a process that we forked, through a pipe that nobody else has.
        return pickle.loads(self.skeleton, buffers=buffers)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented

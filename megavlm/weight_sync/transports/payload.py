"""Tensors as SGLang's update requests carry them: pickled, and many as one.

SGLang's unpickler admits few names; what is pickled here keeps to them, and imports no SGLang.
"""

import base64
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megavlm.parallel import platform


def payload(content: Any) -> str:
    """Of anything with tensors in it: a CPU's by value, a GPU's as CUDA IPC handles, which are good
    as long as the tensors live.

    Not through torch's shared memory: its handles need the server's trust of our processes.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, Tensor) and obj.is_cuda):
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(obj)
        # SGLang's own form: the device by its uuid, as its processes may number devices differently
        device = platform.device_uuid(arguments[_DEVICE])
        return rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


_DEVICE = 6  # where rebuild_cuda_tensor takes the device


def flatten(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """The layout of SGLang's `flattened_bucket`: all bytes one after the other, uint8 [bytes], and
    where each tensor lies in them.

    The places have the fields of SGLang's FlattenedTensorMetadata; SimpleNamespace is a type that
    its unpickler admits.
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

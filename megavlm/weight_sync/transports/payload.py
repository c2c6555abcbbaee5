"""Serialisation of tensors for SGLang's update requests: pickled, and many as one.

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
    """Serialise an object with tensors in it, to base64.

    Tensors of a CPU are included by value, those of a GPU as CUDA IPC handles, which are valid as
    long as the tensors live. torch's shared memory is not used, because a server would have to
    trust this process.
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
    """Join tensors to SGLang's `flattened_bucket`: uint8 [bytes], and each tensor's place in it.

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

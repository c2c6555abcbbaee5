"""Serialization of tensors for SGLang's update requests: pickling, and flattening many into one.

SGLang's unpickler admits only few names. The pickles made here use only these, and SGLang need not
be installed.
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
    """Serialize an object that contains tensors, to base64.

    CPU tensors are included by value, GPU tensors as CUDA IPC handles that are valid as long as the
    tensors live. torch's shared memory is not used, because a server would have to trust this
    process.
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
        # As in SGLang, the device is given by its uuid, because processes may number devices
        # differently.
        device = platform.device_uuid(arguments[_DEVICE])
        return rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


_DEVICE = 6  # index of the device among the arguments of rebuild_cuda_tensor


def flatten(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """Join tensors to SGLang's `flattened_bucket`: a uint8 tensor [bytes], and each tensor's place
    in it.

    The places have the fields of SGLang's FlattenedTensorMetadata. They are SimpleNamespace
    objects, because SGLang's unpickler admits that type.
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

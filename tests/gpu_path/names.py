"""Names of Transformer Engine's compiled module: the enumerations that its Python code compares,
and a stand-in for everything else, which is only named on our path.
"""

from enum import IntEnum
from typing import Any

import torch


class DType(IntEnum):
    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


TORCH_DTYPE = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class Absent(type):
    """Metaclass of what this stand-in does not have: any attribute of it is absent, too, and a call
    of it is an error.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = absent(f"{cls.__name__}.{name}")
        setattr(cls, name, member)  # the same at the next time, as of an enumeration
        return member

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"tests/gpu_path has no {cls.__name__}")


def absent(name: str) -> type:
    """Return a class that stands for a kernel or a class of the compiled module."""
    return Absent(name, (), {})

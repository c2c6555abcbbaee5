"""Safetensors files in a stream: tensors go to the disk one by one, in the order of the header.

The library's `save_file` wants all tensors of a file in memory first. The format: 8 bytes with the
length of the header, little-endian; the header as JSON, padded with spaces; the numbers of each
tensor, one after the other, at the offsets that the header gives.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

Shape = tuple[int, ...]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Spec:
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """Where a tensor's numbers lie in a file."""

    dtype: torch.dtype
    start: int
    nbytes: int


class SafetensorsWriter:
    """Writes a new file; it is on the disk when it is closed."""

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        """`specs`: in the order in which the tensors will be written. Larger items go first, so
        that each tensor begins at a multiple of its item size.
        """
        sizes = [spec.dtype.itemsize for spec in specs.values()]
        assert sizes == sorted(sizes, reverse=True), "larger items go first"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in specs.items():
            start, end = end, end + spec.nbytes
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = end
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """The next tensor, or the next rows of it."""
        try:
            self._left -= self._file.write(raw_bytes(tensor.contiguous()))
        except OSError as error:
            error.filename = self._file.name
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                assert self._left == 0, f"{self._left} bytes were promised, but not written"
                self._file.flush()
                os.fsync(self._file.fileno())


def read_spans(path: Path) -> dict[str, Span]:
    """Of each tensor in a whole safetensors file; ValueError for a dtype that torch has not."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    spans = {}
    for name, value in header.items():
        if value["dtype"] not in _DTYPES:
            raise ValueError(
                f"{path} holds {name} as {value['dtype']}; only {', '.join(_DTYPES)} are read."
            )
        start, end = value["data_offsets"]
        spans[name] = Span(_DTYPES[value["dtype"]], 8 + length + start, end - start)
    return spans


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

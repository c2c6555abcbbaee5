"""Safetensors files read and written tensor by tensor.

The library's `save_file` needs all tensors of a file in memory first, and its reader maps files
into memory. A file consists of: 8 bytes with the length of the header, little-endian; the header as
JSON, padded with spaces; the data of each tensor, one after the other, at the offsets of the
header. Source: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megavlm.checkpointing.atomic import close_written
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.mapping import Shape

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
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSpan:
    """Place of a tensor's data in a file [bytes]."""

    dtype: torch.dtype
    start: int
    nbytes: int


class SafetensorsWriter:
    """Writes a new file, and flushes it to the disk on close."""

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        """Create the file and write its header.

        specs: the specs of the tensors, in the order of writing. Tensors with larger items must
        come first, so that each tensor begins at a multiple of its item size.
        """
        sizes = [spec.dtype.itemsize for spec in specs.values()]
        assert sizes == sorted(sizes, reverse=True), "larger items come first"
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
        """Append the next tensor, or its next rows."""
        self.write_bytes(raw_bytes(tensor.contiguous()))

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Append the next tensor's content."""
        try:
            self._left -= self._file.write(content)
        except OSError as error:
            error.filename = self._file.name
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_written(self._file, is_whole=error is None)
        assert error is not None or self._left == 0, (
            f"{self._left} bytes of the header were not written"
        )


def read_spans(path: Path) -> dict[str, TensorSpan]:
    """Return the place of each tensor in a complete safetensors file.

    Raises ValueError for a dtype that torch does not have.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    spans = {}
    for name, value in header.items():
        if value["dtype"] not in DTYPES:
            raise ValueError(
                f"{path} holds {name} as {value['dtype']}; only {', '.join(DTYPES)} are supported."
            )
        start, end = value["data_offsets"]
        spans[name] = TensorSpan(DTYPES[value["dtype"]], 8 + length + start, end - start)
    return spans


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class UnmappedHFFolder(HFFolder):
    """An HFFolder that reads each tensor into its own memory. Pages of a mapped file would stay in
    memory and count as used, until the whole model is there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._spans = {
            name: span for path in self._files for name, span in read_spans(path).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name, self._spans[name], self.shape(name))

    def row(self, name: str, index: int) -> Tensor:
        span, (count, *shape) = self._spans[name], self.shape(name)
        size = span.nbytes // count
        row = replace(span, start=span.start + index * size, nbytes=size)
        return self._read(name, row, tuple(shape))

    def dtype(self, name: str) -> torch.dtype:
        return self._spans[name].dtype

    def nbytes(self, name: str) -> int:
        return self._spans[name].nbytes

    def _read(self, name: str, span: TensorSpan, shape: Shape) -> Tensor:
        memory = torch.empty(span.nbytes, dtype=torch.uint8)
        buffer, done = raw_bytes(memory), 0
        with open(self.where(name), "rb", buffering=0) as file:
            file.seek(span.start)
            while done < span.nbytes:
                count = file.readinto(buffer[done:])
                if not count:
                    raise ValueError(f"{self.where(name)} ends before {name} does.")
                done += count
        return memory.view(span.dtype).view(shape)

"""Reads full tensors of a step one at a time, in one process and without a model.

torch stores the table of contents of a checkpoint (`.metadata`) as a pickle. It is read with an
unpickler that allows only the classes of such a table, so that a malicious file cannot run code.
"""

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megavlm.models.common.mapping import Shape

CONTENTS = ".metadata"

_SAFE = {
    "torch": {
        "Size", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "uint8", "int8", "int16", "int32", "int64", "bool",
    },
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


# Exceptions that a damaged pickle causes: the pickle module's own, and errors from wrong lengths
# and arguments.
_BROKEN = (
    pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError,
    OverflowError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed there")
        return super().find_class(module, name)


def read_values(path: Path) -> Any:
    """Read tensors and plain values from a file that torch.save wrote.

    Raises ValueError for a damaged file, and for a file with other objects, since loading these
    could run code.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, *_BROKEN) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read as a file of a checkpoint: {reason}") from error


def read_metadata(folder: Path) -> tuple[dict[str, TensorStorageMetadata], dict[Any, Any]]:
    """Return the tensors in a step's table of contents by key, and the places of their pieces.

    Raises ValueError if the table is missing or damaged.
    """
    path = folder / CONTENTS
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        found = metadata.state_dict_metadata.items()
        tensors = {key: x for key, x in found if isinstance(x, TensorStorageMetadata)}
        return tensors, dict(metadata.storage_data)
    except (OSError, MemoryError, *_BROKEN) as error:  # a wrong length causes MemoryError
        raise ValueError(
            f"{path} cannot be read as the contents of a checkpoint: {error!r}."
        ) from error


def has_draft_head(step: "StepReader") -> bool:
    """Return True if a step has a trained draft head."""
    return any(key.startswith("draft_head.") for key in step.tensors)


class StepReader:
    """Tensors of one step by key. A tensor is checked against its checksum when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self._places = read_metadata(folder)

    def shape(self, key: str) -> Shape:
        return tuple(self.tensors[key].size)

    def check(self, key: str, shape: Shape) -> None:
        """Raise ValueError if the step does not hold a tensor of the model in its shape."""
        fix = "name a folder and a checkpoint of one model, or another run.dir"
        if key not in self.tensors:
            raise ValueError(f"{self.folder} has no tensor {key}, but the model needs it: {fix}")
        if self.shape(key) != shape:
            raise ValueError(
                f"{key} in {self.folder} has shape {self.shape(key)}, but the model's has {shape}: "
                f"{fix}"
            )

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def nbytes(self, key: str) -> int:
        return self.tensors[key].size.numel() * self.dtype(key).itemsize

    def read(self, key: str, row: int | None = None) -> Tensor:
        """Return the full tensor, or one row of it, from a step saved with any layout.

        Raises ValueError if a part is missing or damaged.
        """
        full = self.shape(key)
        start = (0,) * len(full) if row is None else (row, *(0 for _ in full[1:]))
        sizes = full if row is None else (1, *full[1:])
        tensor = self._box(key, start, sizes)
        return tensor if row is None else tensor[0]

    def _box(self, key: str, start: Shape, sizes: Shape) -> Tensor:
        """Assemble the part of a tensor at `start` with `sizes` from the pieces that overlap it."""
        box: Tensor | None = None
        found = 0
        for chunk in self.tensors[key].chunks:
            if (tuple(chunk.offsets), tuple(chunk.sizes)) == (start, sizes):
                return self._record(key, chunk)
            low = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            ends = zip(start, sizes, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            if box is None:
                box = torch.empty(sizes, dtype=self.dtype(key))
            here = [slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True)]
            there = [slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True)]
            part = self._record(key, chunk)[tuple(there)]
            box[tuple(here)].copy_(part)
            found += part.numel()
        if box is None or found != box.numel():
            raise ValueError(f"{self.folder} holds only a part of {key}.")
        return box

    def _record(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Load a piece: a zip archive by torch.save, with a checksum for each of its files."""
        place = self._places[MetadataIndex(key, chunk.offsets)]
        path = self.folder / place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                record = _Part(file, place.offset, place.length)
                archive = zipfile.ZipFile(record)
                numbers = [x for x in archive.infolist() if x.filename.endswith("/data/0")]
                for info in archive.infolist():
                    if info not in numbers:
                        archive.read(info)  # a small file; reading it verifies its checksum
                record.seek(0)
                tensor: Tensor = torch.load(
                    cast(IO[bytes], record), map_location="cpu", weights_only=True
                )
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing.") from error
        except (zipfile.BadZipFile, zlib.error, *_BROKEN) as error:
            raise ValueError(f"{path} is damaged at {key}: {error}.") from error
        # The values are checked after they are loaded, so that they are read only once.
        if [_crc32(tensor)] != [info.CRC for info in numbers]:
            raise ValueError(f"{path} is damaged: the checksum of {key} differs.")
        if (tensor.dtype, tensor.shape) != (self.dtype(key), chunk.sizes):
            raise ValueError(
                f"{path} holds {tensor.dtype} {tuple(tensor.shape)} as {key}; the contents list "
                f"{self.dtype(key)} {tuple(chunk.sizes)}."
            )
        return tensor


class _Part(io.RawIOBase):
    """A range of a file as a file object for torch.load and zipfile."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = origin + offset
        if not 0 <= self._position <= self._length:
            raise ValueError("an offset is outside of it")
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        done = self._file.readinto(memoryview(buffer)[:count])
        self._position += done
        return done


def _crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of the tensor's storage."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return zlib.crc32(storage.numpy().data)

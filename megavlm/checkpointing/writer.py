"""Writes tensors as a step without a model, one piece at a time, in the form that megatron-core's
`dist_checkpointing.load` reads. Its own writer wants all of a process's tensors in memory first.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megavlm.checkpointing.checksums import SummedFile

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """A piece of the tensor `key` that begins at `offsets` and has `sizes`, and where it lies."""

    key: str
    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


class RecordFile(SummedFile):
    """One file of pieces. `records` says where they lie, `sums` is for the manifest."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.name = f"__{rank}_0.distcp"
        self.records: list[Record] = []
        super().__init__(folder / self.name)

    def add(self, key: str, piece: Tensor, offsets: Shape | None = None) -> None:
        """`offsets`: where the piece begins in the tensor; by default it is all of it."""
        start = self.sums["bytes"]
        save_tensor(piece, self)
        sizes = tuple(piece.shape)
        length = self.sums["bytes"] - start
        self.records.append(
            Record(key, offsets or (0,) * len(sizes), sizes, self.name, start, length)
        )


def save_tensor(tensor: Tensor, file: SummedFile) -> None:
    """As torch.save has it. OSError where the file cannot be written."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes the whole storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, cast(IO[bytes], file))
    except RuntimeError as error:
        if file.problem is not None:  # torch says something else about a failed write
            raise file.problem from error
        raise


def write_contents(folder: Path, tensors: Mapping[str, Tensor], records: Iterable[Record]) -> None:
    """Writes what a step holds besides its record files. `tensors`: key -> the whole tensor, on the
    meta device.
    """
    contents: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks=[])
        for key, tensor in tensors.items()
    }
    places = {}
    for record in records:
        chunks = contents[record.key].chunks
        index = MetadataIndex(record.key, record.offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes)))
        places[index] = _StorageInfo(record.file, record.start, record.length)
    metadata = Metadata(
        contents, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))

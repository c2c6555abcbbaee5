"""Writes tensors as a step without a model, one piece at a time, in the format that megatron-core's
`dist_checkpointing.load` reads. megatron-core's own writer needs all tensors in memory first.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
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
from megavlm.checkpointing.reader import CONTENTS
from megavlm.models.common.mapping import Shape


@dataclass(frozen=True)
class TensorPiece:
    """A piece of the tensor `key`, at `offsets` with `sizes`, and its place in a file in bytes."""

    key: str
    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


class RecordFile(SummedFile):
    """A file of tensor pieces.

    pieces: The pieces with their places.
    sums: The file's entry in the manifest.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.name = f"__{rank}_0.distcp"
        self.pieces: list[TensorPiece] = []
        super().__init__(folder / self.name)

    def add(self, key: str, piece: Tensor, offsets: Shape | None = None) -> None:
        """Append a piece. `offsets` is its start in the tensor; None means that the piece is the
        whole tensor.
        """
        start = self.sums["bytes"]
        save_tensor(piece, self)
        sizes = tuple(piece.shape)
        length = self.sums["bytes"] - start
        self.pieces.append(
            TensorPiece(key, offsets or (0,) * len(sizes), sizes, self.name, start, length)
        )


def save_tensor(tensor: Tensor, file: SummedFile) -> None:
    """Append a tensor in torch.save's format. Raises OSError if the file cannot be written."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes the whole storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, cast(IO[bytes], file))
    except RuntimeError as error:
        if file.problem is not None:  # torch raises its own error in place of the failed write's
            raise file.problem from error
        raise


def write_contents(
    folder: Path, tensors: Mapping[str, Tensor], pieces: Iterable[TensorPiece]
) -> None:
    """Write the files of a step that are not record files.

    tensors: Maps a key to the whole tensor on the meta device.
    pieces: All pieces of the record files.
    """
    contents: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks=[])
        for key, tensor in tensors.items()
    }
    places = {}
    for piece in pieces:
        chunks = contents[piece.key].chunks
        index = MetadataIndex(piece.key, piece.offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
        places[index] = _StorageInfo(piece.file, piece.start, piece.length)
    metadata = Metadata(
        contents, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
    (folder / CONTENTS).write_bytes(pickle.dumps(metadata))
    torch.save({}, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))

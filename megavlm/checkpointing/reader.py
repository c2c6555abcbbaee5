"""Reads tensors out of a step, whole and one at a time, in one process and without a model.

torch keeps a checkpoint's table of contents (`.metadata`) as a pickle. It is read here by an
unpickler that builds the table's own classes and nothing else: a prepared file cannot run code.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

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


# What the pickle module says that reading a broken pickle may raise.
_UNREADABLE = (
    OSError, pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError,
    TypeError, ValueError,
)  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The table of contents of a step; ValueError where it is none."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except _UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a checkpoint's contents: {error}.") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} cannot be read as a checkpoint's contents.")
    return metadata


class StepReader(dcp.FileSystemReader):
    """The tensors of one step by key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder)
        self.tensors = {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def read(self, key: str) -> Tensor:
        """The full tensor, whatever layout saved it."""
        tensor = torch.empty(self.shape(key), dtype=self.dtype(key))
        with warnings.catch_warnings():
            # One process on purpose: torch.distributed is not needed.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                {key: tensor},
                storage_reader=self,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=True,
            )
        return tensor

"""Sources of HF tensors: a folder, read lazily, or a state dict in memory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megavlm import git_lfs
from megavlm.models.folder_files import check_pickles

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFFolder(Mapping[str, Tensor]):
    """Tensors of an HF folder by the names in its files. A tensor is read when it is accessed.

    Only safetensors are read, because pickled weights can run code. The constructor reads the
    headers, so that a missing or truncated file raises ValueError before anything is loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = {path: open_safetensors(path) for path in _weight_files(self.folder)}
        self._places = {name: path for path, file in self._files.items() for name in file.keys()}
        for name, file_name in _index(self.folder).items():
            if name not in self._places:
                raise ValueError(
                    f"{self.folder / file_name} does not hold {name}, although {INDEX} says so."
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._places[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def row(self, name: str, index: int) -> Tensor:
        """Return row `index` of a tensor, without reading the others."""
        row: Tensor = self._slice(name)[index]
        return row

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, from the header only."""
        empty: Tensor = self._slice(name)[:0]
        return empty.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header only."""
        return tuple(self._slice(name).get_shape())

    def where(self, name: str) -> str:
        """Return the file that holds a tensor, for error messages."""
        return str(self._places[name])

    def __str__(self) -> str:
        return str(self.folder)

    def _slice(self, name: str) -> Any:
        return self._files[self._places[name]].get_slice(name)


class StateDict(Mapping[str, Tensor]):
    """Tensors in memory, with the interface of HFFolder."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def row(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def where(self, name: str) -> str:
        return str(self)

    def __str__(self) -> str:
        return "the state dict"


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = _index(folder)
    paths = [folder / file_name for file_name in dict.fromkeys(index.values())]
    for path in paths:
        if not path.is_file():
            count = sum(file_name == path.name for file_name in index.values())
            raise ValueError(f"{path} is missing: {INDEX} places {count} tensors in it.")
    if paths:
        return paths
    check_pickles(folder)
    raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}.")


def _index(folder: Path) -> dict[str, str]:
    """Read the map from tensor name to file name. It is empty for a folder with a single weight
    file.
    """
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return {}
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        names = {name: Path(file_name).name for name, file_name in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors index: {error!r}.") from error
    for name, file_name in places.items():
        if names[name] != file_name:
            raise ValueError(
                f"{path} places {name} in {file_name!r}, but this folder has no such file."
            )
    return dict(places)


def open_safetensors(path: Path) -> safe_open:
    """Open a file. Raises ValueError with a sentence for one that is not whole."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    except SafetensorError as error:
        with path.open("rb") as file:
            if git_lfs.is_pointer(file.read(64)):
                raise ValueError(f"{path}: {git_lfs.FETCH}.") from error
        raise ValueError(f"{path} is not a complete safetensors file: {error}.") from error

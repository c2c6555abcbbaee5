"""HuggingFace weights into a model: a lazy reader of HF folders, and each rank's slices."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megavlm.models.common.mapping import Entry, shard_tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFFolder(Mapping[str, Tensor]):
    """The tensors of an HF folder by the names in its files; a tensor is read when it is asked for.

    Only safetensors are read: pickled weights can run code. Opening reads the headers, so that a
    missing or truncated file is a ValueError before anything is loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = {path: _open(path) for path in _weight_files(self.folder)}
        self._places = {name: path for path, file in self._files.items() for name in file.keys()}
        for name, file_name in _index(self.folder).items():
            if name not in self._places:
                raise ValueError(
                    f"{self.folder / file_name} does not hold {name}, which {INDEX} places there."
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._places[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype(self, name: str) -> torch.dtype:
        """Read from the header alone."""
        empty: Tensor = self._files[self._places[name]].get_slice(name)[:0]
        return empty.dtype

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._places[name]


class HubTensors:
    """A source of HF tensors under either naming, checked against a mapping's names and shapes.

    The hub's Qwen2-VL and Qwen2.5-VL files say `visual.*` and `model.layers.*`; transformers 5 in
    memory says `model.visual.*` and `model.language_model.layers.*`.
    """

    def __init__(self, entries: Sequence[Entry], source: Mapping[str, Tensor]) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        for name in source:
            other = self._names.setdefault(_short(name), name)
            if other != name:
                raise ValueError(
                    f"{self._origin} holds one tensor under two names: {other} and {name}."
                )
        self._check_names(entries)

    def read(self, entry: Entry) -> Tensor:
        """The full Megatron tensor of an entry."""
        tensors = []
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            source_name = self._names[_short(name)]
            tensor = self._source[source_name]
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{source_name} in {self._where(source_name)} has shape {tuple(tensor.shape)}; "
                    f"config.json makes it {shape}."
                )
            tensors.append(tensor)
        return entry.to_megatron(tensors)

    def dtype(self, entry: Entry) -> torch.dtype:
        """The dtype of an entry's tensors; ValueError where they differ."""
        dtypes = {self._dtype(self._names[_short(name)]) for name in entry.hf}
        if len(dtypes) > 1:
            raise ValueError(f"{', '.join(entry.hf)} make one tensor, but have different dtypes.")
        return dtypes.pop()

    def _dtype(self, name: str) -> torch.dtype:
        if isinstance(self._source, HFFolder):
            return self._source.dtype(name)
        return self._source[name].dtype

    def _check_names(self, entries: Sequence[Entry]) -> None:
        expected = {_short(name): name for entry in entries for name in entry.hf}
        missing = [name for short, name in expected.items() if short not in self._names]
        if missing:
            raise ValueError(
                f"{self._origin} has no tensor {missing[0]}{_and_more(missing)}, "
                f"which its config.json asks for."
            )
        unknown = [name for short, name in self._names.items() if short not in expected]
        if "lm_head.weight" in unknown:  # tied embeddings, written twice
            self._check_tied()
            unknown.remove("lm_head.weight")
        if unknown:
            raise ValueError(
                f"{unknown[0]}{_and_more(unknown)} in {self._where(unknown[0])} is no tensor of "
                f"the model that its config.json describes."
            )

    def _check_tied(self) -> None:
        embedding = self._names["model.embed_tokens.weight"]
        if not torch.equal(self._source["lm_head.weight"], self._source[embedding]):
            raise ValueError(
                f"lm_head.weight in {self._where('lm_head.weight')} differs from {embedding}, but "
                f"config.json ties them: set tie_word_embeddings to false or remove lm_head.weight."
            )

    @property
    def _origin(self) -> str:
        return str(self._source.folder) if isinstance(self._source, HFFolder) else "the state dict"

    def _where(self, name: str) -> str:
        return str(self._source.file(name)) if isinstance(self._source, HFFolder) else self._origin


@torch.no_grad()
def load_hf(
    model: MegatronModule,
    entries: Sequence[Entry],
    source: Mapping[str, Tensor],
    tp_rank: int,
    tp_size: int,
) -> None:
    """Copies this rank's slices of HF tensors into the model's own, in place, in the model's dtype.

    `source` is an HFFolder or a state dict, under either naming. The model's tensors are those of
    `model.sharded_state_dict()`; each must have an entry, but a pipeline stage holds only some.
    ValueError names the tensor that is missing, unknown, or of another shape.
    """
    tensors = HubTensors(entries, source)
    table = {entry.megatron: entry for entry in entries}
    for target in local_tensors(model):
        entry = table.get(target.key)
        assert entry is not None, f"the mapping has no entry for the model's tensor {target.key}"
        shard = shard_tensor(entry, tensors.read(entry), tp_rank, tp_size)
        if shard.shape != target.data.shape:
            raise ValueError(
                f"{target.key}: the model holds {tuple(target.data.shape)} on this rank, "
                f"and {', '.join(entry.hf)} give {tuple(shard.shape)}."
            )
        target.data.copy_(shard)


def local_tensors(model: MegatronModule) -> list[ShardedTensor | ShardedTensorFactory]:
    """The model's tensors on this rank, each with its checkpoint `key` and its `data`.

    Leaves out `_extra_state` objects (Transformer Engine's fp8 states), which HF does not have.
    """
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return [
        value for value in state.values() if isinstance(value, ShardedTensor | ShardedTensorFactory)
    ]


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
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if pickles:
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code when read: "
            f"convert them to safetensors."
        )
    raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}.")


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty for a folder with a single weight file."""
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
                f"{path} places {name} in {file_name!r}, which is not a file of this folder."
            )
    return dict(places)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}.") from error


def _short(name: str) -> str:
    """The name without what tells the two namings apart."""
    for long, short in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

"""A model's weights on the disk, in an HF folder or in a step, read alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.family import read_config
from checkpoint_tools.hub_files import HubFiles
from megavlm.checkpointing import folder
from megavlm.checkpointing.checksums import first_difference, size_difference
from megavlm.checkpointing.folder import Manifest
from megavlm.checkpointing.reader import StepReader
from megavlm.models.common.loading import HUB, Form, HubTensors
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Entry, Shape, by_key
from megavlm.models.registry import family

Group = list[Entry]  # the entries of one key


@dataclass(frozen=True)
class Weights:
    """`path`: the HF folder, or the step's own. `hf_files`: where the model's other files lie.
    `read` gives the full Megatron tensor of an entry. `dtypes`: by key. `extras`: shapes and dtypes
    of a step's tensors that are the model's, but not its HF folder's: adapters, a value head.
    `reader`: reads them.
    """

    path: Path
    hf_files: Path
    config: Any
    groups: dict[str, Group]
    dtypes: dict[str, torch.dtype]
    read: Callable[[Entry], Tensor]
    manifest: Manifest | None = None
    extras: tuple[tuple[str, Shape, torch.dtype], ...] = ()
    reader: StepReader | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """That everything is read from."""
        return self.path, self.hf_files

    def entries(self) -> Iterator[Entry]:
        for group in self.groups.values():
            yield from group

    def nbytes(self, key: str) -> int:
        """The same on both sides: a transform moves numbers and adds none."""
        return sum(map(prod, self.groups[key][0].hf_shapes)) * self.dtypes[key].itemsize

    def entry_bytes(self, entry: Entry) -> int:
        """Of one expert, where the key is of several."""
        return self.nbytes(entry.megatron) // len(self.groups[entry.megatron])

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(key) for key in self.groups)


def open_weights(path: Path, *, step: int | None = None, experts: Form = HUB) -> Weights:
    """Of an HF folder (`experts` as in HubTensors), or of a checkpoint (default: its latest step).

    ValueError where it is neither, or incomplete, or has no use for `step` or `experts`.
    """
    if (path / "config.json").is_file():
        if step is not None:
            raise ValueError(f"{path} is a model folder: it has no steps to choose from by --step.")
        return hub_weights(path, experts)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder.")
    if not folder.complete_steps(path) and not (path / folder.MANIFEST).is_file():
        raise ValueError(f"{path} is neither a HuggingFace model folder nor a checkpoint.")
    if experts != HUB:
        raise ValueError(
            f"{path} is a checkpoint, where experts lie in one form: leave --experts out."
        )
    return step_weights(path, step)


def open_both(a: Path, b: Path, experts: tuple[Form, Form] = (HUB, HUB)) -> tuple[Weights, Weights]:
    """To be compared. One folder on both sides is opened once, and warned of once."""
    left = open_weights(a, experts=experts[0])
    if a.resolve() == b.resolve() and experts[0] == experts[1]:
        return left, left
    return left, open_weights(b, experts=experts[1])


def hub_weights(path: Path, experts: Form = HUB, *, without_adapters: bool = False) -> Weights:
    """ValueError for another family, a missing, truncated or pickled weight file, a missing or
    unknown tensor, or a shape that config.json does not give. transformers loads adapters that lie
    beside a model with it, so they are a ValueError too, unless the weights `without_adapters` are
    what is asked for.
    """
    config = read_config(path)
    entries = family(config.model_type).mapping(config)
    tensors = HubTensors(entries, HubFiles(path), experts)
    if not without_adapters and (path / folder.ADAPTER).is_file():
        raise ValueError(
            f"{path} holds adapters beside its model: merge them (megavlm-convert lora-merge "
            f"{path} OUTPUT --adapter {path}) or move them away."
        )
    groups = by_key(entries)
    dtypes = {key: tensors.dtype(group) for key, group in groups.items()}
    return Weights(path, path, config, groups, dtypes, tensors.read)


def step_weights(checkpoint_dir: Path, step: int | None = None) -> Weights:
    """ValueError where the step is missing or its files are not as its manifest says, or it does
    not hold the tensors of its config.json. Tensors are checked when they are read.
    """
    path = folder.locate(checkpoint_dir, step)
    manifest = Manifest.read(path)
    small = [name for name in manifest.files if not name.endswith(".distcp")]
    if problem := (
        size_difference(path, manifest.files, manifest.files)
        or first_difference(path, manifest.files, small)
    ):
        raise ValueError(problem)
    folder.check_hf_files(path.parent)
    hf_files = path.parent / folder.HF
    config = read_config(hf_files)
    groups = by_key(family(config.model_type).mapping(config))
    reader = StepReader(path)
    extras = tuple(_check(groups, reader))
    dtypes = {key: reader.dtype(key) for key in groups}

    def read(entry: Entry) -> Tensor:
        return reader.read(entry.megatron, entry.expert)

    return Weights(path, hf_files, config, groups, dtypes, read, manifest, extras, reader)


def _check(
    groups: dict[str, Group], reader: StepReader
) -> Iterator[tuple[str, Shape, torch.dtype]]:
    """The step holds the model's tensors, in its shapes. Gives those that it has besides."""
    path = reader.folder
    for key, group in groups.items():
        if key not in reader.tensors:
            raise ValueError(f"{path} has no tensor {key}, which the model's config.json asks for.")
        if reader.shape(key) != group[0].checkpoint_shape:
            raise ValueError(
                f"{key} in {path} has shape {reader.shape(key)}; "
                f"the model's config.json makes it {group[0].checkpoint_shape}."
            )
    parts = {key.split(".")[0] for key in groups}
    for key in reader.tensors:
        part = key.split(".")[0]
        if part == "value_head" or (part in parts and is_adapter(key)):
            yield key, reader.shape(key), reader.dtype(key)
        elif part in parts and key not in groups:
            raise ValueError(f"{key} in {path} is no tensor of the model in its config.json.")

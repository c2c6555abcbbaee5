"""Weights of a model on disk, in a HuggingFace folder or in a step of a checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.hf_config import mapping_of, read_config
from checkpoint_tools.safetensors_io import UnmappedHFFolder
from megavlm.checkpointing.checksums import first_difference, size_difference
from megavlm.checkpointing.folder import (
    HF_FILES,
    Manifest,
    check_hf_files,
    check_no_adapters,
    experts_form,
    is_checkpoint,
    locate_step,
)
from megavlm.checkpointing.reader import StepReader, has_draft_head
from megavlm.models.common.loading import HUB, Form, HubTensors, has_own_head
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Entry, Shape, by_key
from megavlm.models.folder_files import check_files

KeyEntries = list[Entry]  # entries of one Megatron key


@dataclass(frozen=True)
class Weights:
    """Weights of a model, read tensor by tensor.

    path: the HuggingFace folder, or the folder of the step. hf_files: the folder with the model's
    other files. groups, dtypes: entries and dtype by Megatron key. read: function that returns the
    full Megatron tensor of an entry. extras: name, shape and dtype of tensors in the step that a
    HuggingFace folder does not have (adapters and a value head). reader: reads the extras. experts:
    format of the experts in the folder, or in the folder from which a checkpoint was imported.
    """

    path: Path
    hf_files: Path
    config: Any
    groups: dict[str, KeyEntries]
    dtypes: dict[str, torch.dtype]
    read: Callable[[Entry], Tensor]
    manifest: Manifest | None = None
    extras: tuple[tuple[str, Shape, torch.dtype], ...] = ()
    reader: StepReader | None = None
    experts: Form = HUB

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders from which the weights are read."""
        return self.path, self.hf_files

    def entries(self) -> Iterator[Entry]:
        for group in self.groups.values():
            yield from group

    def nbytes(self, key: str) -> int:
        """Return the size of a key's tensor in bytes. It is the same in both formats."""
        return sum(map(prod, self.groups[key][0].hf_shapes)) * self.dtypes[key].itemsize

    def entry_bytes(self, entry: Entry) -> int:
        """Return the bytes of an entry's tensor, or of one expert if the key stacks several."""
        return self.nbytes(entry.megatron) // len(self.groups[entry.megatron])

    @property
    def is_wrongly_tied(self) -> bool:
        """True if config.json ties embedding and head, although the weights have both."""
        tied = read_config(self.hf_files).tie_word_embeddings
        return bool(tied) and not self.config.tie_word_embeddings

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(key) for key in self.groups)


def open_weights(path: Path, *, step: int | None = None, experts: Form | None = None) -> Weights:
    """Open a HuggingFace folder (`experts` as in HubTensors), or a step of a checkpoint (default:
    the latest).

    Raises ValueError if the path is neither, is incomplete, or if `step` or `experts` does not
    apply to it.
    """
    if (path / "config.json").is_file():
        if step is not None:
            raise ValueError(f"{path} is a model folder: it has no steps; leave --step out.")
        return hub_weights(path, experts)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder.")
    if not is_checkpoint(path):
        raise ValueError(f"{path} is neither a HuggingFace model folder nor a checkpoint.")
    if experts is not None:
        raise ValueError(
            f"{path} is a checkpoint and has its own format of experts: leave out --experts."
        )
    return step_weights(path, step)


def open_both(
    a: Path, b: Path, experts: tuple[Form | None, Form | None] = (None, None)
) -> tuple[Weights, Weights]:
    """Open two models for a comparison. A folder that is on both sides is opened once."""
    left = open_weights(a, experts=experts[0])
    if a.resolve() == b.resolve() and experts[0] == experts[1]:
        return left, left
    return left, open_weights(b, experts=experts[1])


def hub_weights(
    path: Path, experts: Form | None = None, *, without_adapters: bool = False
) -> Weights:
    """Open a HuggingFace folder.

    Raises ValueError for an unsupported family, a missing, truncated or pickled weight file, a
    missing or unknown tensor, or a shape or another file that does not agree with config.json.
    Unless `without_adapters`, raises it also for adapters in the folder of the model, because
    transformers would load them with the model.
    """
    config, source = read_config(path), UnmappedHFFolder(path)
    if config.tie_word_embeddings and has_own_head(source):
        config.tie_word_embeddings = False  # as in transformers, whatever config.json says
    entries = mapping_of(path, config)
    tensors = HubTensors(entries, source, experts)
    check_files(path)
    if not without_adapters:
        check_no_adapters(path)
    groups = by_key(entries)
    dtypes = {key: tensors.dtype(group) for key, group in groups.items()}
    return Weights(path, path, config, groups, dtypes, tensors.read, experts=tensors.form)


def step_weights(
    checkpoint_dir: Path, step: int | None = None, *, like: Path | None = None
) -> Weights:
    """Open a step of a checkpoint (default: the latest). like: A HuggingFace folder of the same
    model, whose form and other files replace those of the checkpoint.

    Raises ValueError if the step is missing, its files differ from its manifest, or it does not
    hold the tensors of its config.json. Tensors are checked when they are read.
    """
    path = locate_step(checkpoint_dir, step)
    manifest = Manifest.read(path)
    small = [name for name in manifest.files if not name.endswith(".distcp")]
    if problem := (
        size_difference(path, manifest.files, manifest.files)
        or first_difference(path, manifest.files, small)
    ):
        raise ValueError(problem)
    check_hf_files(path.parent)
    hf_files = like or path.parent / HF_FILES
    config = read_config(hf_files)
    reader = StepReader(path)
    groups = by_key(mapping_of(hf_files, config, draft_head=has_draft_head(reader)))
    extras = tuple(_check(groups, reader))
    dtypes = {key: reader.dtype(key) for key in groups}

    def read(entry: Entry) -> Tensor:
        return reader.read(entry.megatron, entry.expert)

    form = experts_form(hf_files)
    return Weights(path, hf_files, config, groups, dtypes, read, manifest, extras, reader, form)


def _check(
    groups: dict[str, KeyEntries], reader: StepReader
) -> Iterator[tuple[str, Shape, torch.dtype]]:
    """Check that the step holds the model's tensors, and yield the extras (see Weights)."""
    path = reader.folder
    for key, group in groups.items():
        if key not in reader.tensors:
            raise ValueError(f"{path} has no tensor {key}, but the model's config.json needs it.")
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
            raise ValueError(f"{key} in {path} is not a tensor of the model in its config.json.")

"""Checkpoint folder -> HuggingFace folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.ahead import one_ahead
from checkpoint_tools.family import read_mapping
from checkpoint_tools.output import output_folder
from checkpoint_tools.safetensors_file import SafetensorsWriter, Spec
from megavlm.checkpointing import folder
from megavlm.checkpointing.checksums import first_difference, size_difference
from megavlm.checkpointing.reader import StepReader
from megavlm.models.common.hf_source import INDEX, SINGLE
from megavlm.models.common.mapping import Entry, by_key

Group = list[Entry]  # the entries of one key


@dataclass(frozen=True)
class Export:
    step: int
    num_tensors: int
    num_files: int


def export_hf(
    checkpoint_dir: Path,
    hf_dir: Path,
    *,
    step: int | None = None,
    force: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> Export:
    """Writes a step's weights (default: the latest) under hub names, and the model's other files.

    Reads any layout, one tensor (or one layer's stack of experts) at a time, and holds one output
    file in memory. ValueError where the step is missing or damaged, or does not hold the tensors of
    its config.json.
    """
    path = folder.locate(checkpoint_dir, step)
    manifest = folder.Manifest.read(path)
    small = [name for name in manifest.files if not name.endswith(".distcp")]
    if problem := size_difference(path, manifest.files, manifest.files) or first_difference(
        path, manifest.files, small
    ):
        raise ValueError(problem)
    hf_files = path.parent / folder.HF
    groups = by_key(read_mapping(hf_files))
    reader = StepReader(path)
    _check(groups, reader, path)

    def read(entry: Entry) -> list[Tensor]:
        """Tensors of the hub, or an expert's rows of them."""
        full = reader.read(entry.megatron, entry.expert)
        return [tensor.contiguous() for tensor in entry.to_hf(full)]

    files = _plan(list(groups.values()), reader, max_shard_bytes)
    with output_folder(hf_dir, force=force, mark="config.json") as output:
        folder.copy_hf_files(hf_files, output)
        _set_dtype(output / "config.json", reader.dtype(next(reversed(groups))))
        places: dict[str, str] = {}
        total = 0
        for number, part in enumerate(files, start=1):
            name = (
                f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
            )
            specs = {
                hf: Spec(reader.dtype(group[0].megatron), shape)
                for group in part
                for hf, shape in zip(group[0].hf, group[0].hf_shapes, strict=True)
            }
            with SafetensorsWriter(output / name, specs) as file:
                for tensors in one_ahead(read, chain.from_iterable(part)):
                    for tensor in tensors:
                        file.write(tensor)
            places |= dict.fromkeys(specs, name)
            total += sum(spec.nbytes for spec in specs.values())
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Export(step=manifest.step, num_tensors=len(places), num_files=len(files))


def _check(groups: dict[str, Group], reader: StepReader, path: Path) -> None:
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
        if key.split(".")[0] in parts and key not in groups:
            raise ValueError(f"{key} in {path} is no tensor of the model in its config.json.")


def _plan(groups: Sequence[Group], reader: StepReader, max_shard_bytes: int) -> list[list[Group]]:
    """Groups by output file, in order. A file is above `max_shard_bytes` for one group only."""
    files: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        metadata = reader.tensors[group[0].megatron]
        nbytes = metadata.size.numel() * metadata.properties.dtype.itemsize
        if files[-1] and size + nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += nbytes
    return files


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """config.json names the dtype of the weights beside it: training may have changed it."""
    config = json.loads(path.read_bytes())
    name = str(dtype).removeprefix("torch.")
    changed = [key for key in ("dtype", "torch_dtype") if config.get(key, name) != name]
    if changed:
        path.write_text(json.dumps(config | dict.fromkeys(changed, name), indent=2) + "\n")

"""Checkpoint folder -> HuggingFace folder, with adapters merged if there are any."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.adapters import Adapters, merged
from checkpoint_tools.ahead import one_ahead
from checkpoint_tools.family import dtype_keys
from checkpoint_tools.model_card import model_card
from checkpoint_tools.output import output_folder
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.safetensors_file import SafetensorsWriter, Spec
from checkpoint_tools.step_adapters import has_adapters, step_adapters
from checkpoint_tools.weights import Group, Weights, step_weights
from megavlm.checkpointing import folder
from megavlm.models.common.hf_source import INDEX, SINGLE
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Entry


@dataclass(frozen=True)
class Export:
    """`step`: of a checkpoint. `num_merged`: projections whose adapters are in the weights.
    `left_out`: what a HuggingFace folder has no place for, a critic's value head.
    """

    step: int | None
    num_tensors: int
    num_files: int
    num_bytes: int
    num_merged: int
    left_out: list[str]

    def remarks(self) -> str:
        """For the end of a sentence."""
        return f"; left out: {', '.join(self.left_out)}" if self.left_out else ""


def export_hf(
    checkpoint_dir: Path,
    hf_dir: Path,
    *,
    step: int | None = None,
    force: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    alpha: float | None = None,
    show: Show = silent,
) -> Export:
    """Writes a step's weights (default: the latest) under hub names, the model's other files, and a
    model card. Adapters are merged: what is written is the model that was trained.

    Reads any layout, and holds two tensors in memory, of experts one by one. `dtype`: of the
    weights, by default the one that they have. `alpha`: of adapters, where nothing tells it.
    ValueError where the step is missing or damaged, or does not hold the tensors of its
    config.json; where a number is too large for `dtype`; where the output folder is in use, or its
    disk has no room.
    """
    weights = step_weights(checkpoint_dir, step)
    adapters = None
    if alpha is not None or has_adapters(weights):
        adapters = step_adapters(weights, alpha=alpha)
    return write_hf(
        weights,
        hf_dir,
        adapters=adapters,
        force=force,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        show=show,
    )


def write_hf(
    weights: Weights,
    hf_dir: Path,
    *,
    adapters: Adapters | None = None,
    force: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    show: Show = silent,
) -> Export:
    """The weights, with `adapters` merged in fp32 and rounded once. ValueError where that is too
    large for its dtype, where the output folder is in use, or its disk has no room.
    """
    source = weights if adapters is None else merged(weights, adapters)
    plan = _plan(weights, dtype, max_shard_bytes)
    total = sum(file.nbytes for file in plan)

    def read(entry: Entry) -> list[Tensor]:
        """Tensors of the hub, or an expert's rows of them."""
        full = _rounded(entry, source.read(entry), dtype or weights.dtypes[entry.megatron])
        return [tensor.contiguous() for tensor in entry.to_hf(full)]

    sources = (*weights.folders, *([adapters.path] if adapters else []))
    with (
        output_folder(
            hf_dir, sources=sources, force=force, mark="config.json", nbytes=total
        ) as output,
        show("export", total) as advance,
    ):
        folder.copy_hf_files(weights.hf_files, output)
        _set_dtype(output / "config.json", dtype or weights.dtypes[next(reversed(weights.groups))])
        (output / "README.md").write_text(model_card(weights, adapters))
        for part in plan:
            with SafetensorsWriter(output / part.name, part.specs) as file:
                for tensors in one_ahead(read, chain.from_iterable(part.groups)):
                    for tensor in tensors:
                        file.write(tensor)
                        advance(tensor.nbytes)
        places = {name: part.name for part in plan for name in part.specs}
        if len(plan) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    step = weights.manifest.step if weights.manifest else None
    num_merged = len(list(adapters.projections())) if adapters else 0
    left_out = [name for name, *_ in weights.extras if not is_adapter(name)]
    return Export(step, len(places), len(plan), total, num_merged, left_out)


def _rounded(entry: Entry, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A Megatron tensor in `dtype`; ValueError for a finite number that this makes infinite."""
    full = exact.to(dtype)
    # Two numbers tell all of them: infinite ones are at an end, and one NaN makes both ends NaN.
    if full.dtype == exact.dtype or torch.stack(torch.aminmax(full)).isfinite().all():
        return full
    for name, tensor in zip(entry.hf, entry.to_hf(exact), strict=True):
        finite = tensor[tensor.isfinite()]
        if finite.to(dtype).isinf().any():
            raise ValueError(
                f"{name} holds {finite[finite.abs().argmax()]:g}, and "
                f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}: export "
                f"with --dtype {'bfloat16' if dtype == torch.float16 else 'float32'}."
            )
    return full


@dataclass
class _File:
    """A weight file to be written. `specs`: of its tensors by hub name, in order."""

    name: str
    groups: list[Group]
    specs: dict[str, Spec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def _plan(weights: Weights, dtype: torch.dtype | None, max_shard_bytes: int) -> list[_File]:
    """In the mapping's order. A file is above `max_shard_bytes` for one key only."""
    files: list[_File] = []
    for key, group in weights.groups.items():
        specs = {
            name: Spec(dtype or weights.dtypes[key], shape)
            for name, shape in zip(group[0].hf, group[0].hf_shapes, strict=True)
        }
        nbytes = sum(spec.nbytes for spec in specs.values())
        if not files or files[-1].nbytes + nbytes > max_shard_bytes:
            files.append(_File(SINGLE, [], {}))
        files[-1].groups.append(group)
        files[-1].specs |= specs
    for number, file in enumerate(files, start=1):
        if len(files) > 1:
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _large_items_first(file)
    return files


def _large_items_first(file: _File) -> None:
    """As SafetensorsWriter asks for; where all have one dtype, the order stays."""

    def itemsize(name: str) -> int:
        return -file.specs[name].dtype.itemsize

    file.groups.sort(key=lambda group: itemsize(group[0].hf[0]))
    file.specs = {name: file.specs[name] for name in sorted(file.specs, key=itemsize)}


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """config.json names the dtype of the weights beside it: training may have changed it."""
    config = json.loads(path.read_bytes())
    name = str(dtype).removeprefix("torch.")
    changed = False
    for section, key in dtype_keys(config):
        changed |= section[key] != name
        section[key] = name
    if changed:
        path.write_text(json.dumps(config, indent=2) + "\n")

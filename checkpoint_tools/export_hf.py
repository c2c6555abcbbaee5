"""Export of a checkpoint as a HuggingFace folder, with its adapters merged."""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.draft_head import FOLDER, write_head
from checkpoint_tools.hf_config import dtype_keys, untie
from checkpoint_tools.lora.adapters import AdapterPairs, merged_weights
from checkpoint_tools.lora.step_adapters import has_adapters, step_adapters
from checkpoint_tools.model_card import model_card, pixel_limits
from checkpoint_tools.output_folder import output_folder
from checkpoint_tools.pixel_limits import write_pixel_limits
from checkpoint_tools.safetensors_io import DTYPES, SafetensorsWriter, Spec
from checkpoint_tools.streaming import ShowProgress, no_progress, prefetch
from checkpoint_tools.weights import KeyEntries, Weights, step_weights
from megavlm.checkpointing.folder import copy_hf_files
from megavlm.checkpointing.untrained import UntrainedTensor, untrained_tensors
from megavlm.families import AUTHORS, family
from megavlm.models.common.hf_source import INDEX, SINGLE
from megavlm.models.common.loading import MEMORY, Form, written_shapes
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Entry


@dataclass(frozen=True)
class WriteOptions:
    """Options of a written HuggingFace folder.

    force: replace an older folder. max_shard_bytes: size of the largest weight file. dtype: dtype
    of the written weights; None keeps their own. experts: format of stacked experts; None keeps the
    format of the source. show: progress display.
    """

    force: bool = False
    max_shard_bytes: int = 5 * 10**9
    dtype: torch.dtype | None = None
    experts: Form | None = None
    show: ShowProgress = no_progress


@dataclass(frozen=True)
class Export:
    """Result of an export.

    step: exported step, if the source is a checkpoint. num_merged: number of projections with
    merged adapters. left_out: tensors that a HuggingFace folder cannot hold, such as a critic's
    value head.
    """

    step: int | None
    num_tensors: int
    num_files: int
    num_bytes: int
    num_merged: int
    left_out: list[str]

    def remarks(self) -> str:
        """Return remarks to append to the sentence that reports the export."""
        return f"; left out: {', '.join(self.left_out)}" if self.left_out else ""


def export_hf(
    checkpoint_dir: Path,
    hf_dir: Path,
    *,
    step: int | None = None,
    alpha: float | None = None,
    like: Path | None = None,
    options: WriteOptions | None = None,
) -> Export:
    """Write the weights of a step (default: the latest) under hub names, with the model's other
    files and a model card. Adapters are merged, so that the folder holds the trained model. An
    EAGLE-3 draft head is written to FOLDER in it.

    Reads any layout and holds two tensors in memory; each expert counts as one tensor. `alpha`
    is the adapters' alpha, for a step that does not record it. `like` is described in
    `step_weights`. Raises ValueError if the step is missing, damaged or incomplete, if a value is
    too large for the dtype, and for every reason that `output_folder` has.
    """
    weights = step_weights(checkpoint_dir, step, like=like)
    adapters = None
    if alpha is not None or has_adapters(weights):
        adapters = step_adapters(weights, alpha=alpha)
    return write_hf(weights, hf_dir, adapters=adapters, options=options)


def write_hf(
    weights: Weights,
    hf_dir: Path,
    *,
    adapters: AdapterPairs | None = None,
    options: WriteOptions | None = None,
) -> Export:
    """Write weights, with `adapters` merged in fp32 and rounded once, as a HuggingFace folder.

    The pixel limits of the training run are written to the preprocessor files. Raises ValueError if
    a sum is too large for its dtype, or as `output_folder` does.
    """
    options = options or WriteOptions()
    dtype = options.dtype
    source = weights if adapters is None else merged_weights(weights, adapters)
    form = options.experts or weights.experts
    untrained = untrained_part(weights)
    groups, head = _without_own_folder(weights)
    plan = _plan(weights, groups, dtype, options.max_shard_bytes, form, untrained)
    total = sum(file.nbytes for file in plan)

    def read(entry: Entry) -> list[Tensor]:
        """Return the hub tensors of an entry, or one expert's rows of them."""
        full = _rounded(entry, source.read(entry), _dtype(weights, entry, dtype))
        tensors = entry.to_hf(full)
        if form == MEMORY and entry.transposed:
            tensors = tuple(row.t() for row in tensors)
        elif form != MEMORY and entry.separate:
            (row,) = tensors
            tensors = row.chunk(len(written_shapes(entry, form)))
        return [tensor.contiguous() for tensor in tensors]

    sources = (*weights.folders, *([adapters.path] if adapters else []))
    with (
        output_folder(
            hf_dir, sources=sources, force=options.force, mark="config.json", nbytes=total
        ) as output,
        options.show("export", total) as advance,
    ):
        copy_hf_files(weights.hf_files, output)
        write_pixel_limits(output, pixel_limits(weights))
        _write_config(
            output / "config.json",
            dtype or weights.dtypes[next(reversed(weights.groups))],
            unties=weights.is_wrongly_tied,
        )
        card = model_card(weights, adapters, untrained=untrained, has_head_folder=bool(head))
        (output / "README.md").write_text(card)
        for part in plan:
            with SafetensorsWriter(output / part.name, part.specs) as file:
                for tensors in prefetch(read, chain.from_iterable(part.groups)):
                    for tensor in tensors:
                        file.write(tensor)
                        advance(tensor.nbytes)
                for name in part.untrained:
                    content = untrained[name].read()
                    file.write_bytes(content)
                    advance(len(content))
        if head:
            (output / FOLDER).mkdir()
            held = dict(chain.from_iterable(zip(x.hf, read(x), strict=True) for x in head))
            write_head(output / FOLDER, weights.config.text_config, held)
        places = {name: part.name for part in plan for name in part.specs}
        if len(plan) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    step = weights.manifest.step if weights.manifest else None
    num_merged = len(list(adapters.projections())) if adapters else 0
    left_out = [name for name, *_ in weights.extras if not is_adapter(name)]
    num_tensors = len(places) + sum(len(entry.hf) for entry in head)
    num_files = len(plan) + bool(head)
    return Export(step, num_tensors, num_files, total, num_merged, left_out)


def _without_own_folder(weights: Weights) -> tuple[list[KeyEntries], list[Entry]]:
    """Return the entries of the model's files by key, and the entries of an EAGLE-3 draft head,
    whose folder is FOLDER.
    """
    has_folder = family(weights.config.model_type).draft_head == "eagle3"
    groups, head = list[KeyEntries](), list[Entry]()
    for key, group in weights.groups.items():
        if has_folder and key.startswith("draft_head."):
            head += group
        else:
            groups.append(group)
    return groups, head


def untrained_part(weights: Weights) -> dict[str, UntrainedTensor]:
    """Return the tensors of the model's folder that are not among the weights. A trained draft head
    takes the place of the folder's.
    """
    trained = {name.split(".")[0] for entry in weights.entries() for name in entry.hf}
    found = untrained_tensors(weights.hf_files)
    return {name: tensor for name, tensor in found.items() if name.split(".")[0] not in trained}


def _rounded(entry: Entry, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a Megatron tensor to `dtype`. Raises ValueError if a finite value becomes infinite."""
    full = exact.to(dtype)
    # Minimum and maximum suffice: an infinite value is one of them, and a NaN makes both NaN.
    if full.dtype == exact.dtype or torch.stack(torch.aminmax(full)).isfinite().all():
        return full
    for name, tensor in zip(entry.hf, entry.to_hf(exact), strict=True):
        finite = tensor[tensor.isfinite()]
        if finite.to(dtype).isinf().any():
            raise ValueError(
                f"{name} holds {finite[finite.abs().argmax()]:g}, but "
                f"{str(dtype).removeprefix('torch.')} has a maximum of {torch.finfo(dtype).max:g}: "
                f"export with --dtype {'bfloat16' if dtype == torch.float16 else 'float32'}."
            )
    return full


@dataclass
class _File:
    """Weight file to be written. specs: specs of its tensors by hub name, in order. untrained:
    names of tensors that are copied.
    """

    name: str
    groups: list[KeyEntries]
    specs: dict[str, Spec]
    untrained: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def _plan(
    weights: Weights,
    groups: Iterable[KeyEntries],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    form: Form,
    untrained: Mapping[str, UntrainedTensor],
) -> list[_File]:
    """Distribute the keys over files, in the order of the mapping; untrained tensors get a file of
    their own. A file exceeds `max_shard_bytes` only if it holds a single key.
    """
    files: list[_File] = []
    for group in groups:
        specs = {
            name: Spec(_dtype(weights, entry, dtype), shape)
            for entry in group
            for name, shape in written_shapes(entry, form).items()
        }
        nbytes = sum(spec.nbytes for spec in specs.values())
        if not files or files[-1].nbytes + nbytes > max_shard_bytes:
            files.append(_File(SINGLE, [], {}))
        files[-1].groups.append(group)
        files[-1].specs |= specs
    if untrained:
        kept = {
            name: Spec(DTYPES[tensor.dtype], tensor.shape) for name, tensor in untrained.items()
        }
        names = sorted(kept, key=lambda name: -kept[name].dtype.itemsize)
        files.append(_File(SINGLE, [], {name: kept[name] for name in names}, tuple(names)))
    for number, file in enumerate(files, start=1):
        if len(files) > 1:
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _large_items_first(file, form)
    return files


def _dtype(weights: Weights, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of an entry's tensors in a folder with `dtype` (None: the weights' own)."""
    if entry.dtype is not None or dtype is None:
        return weights.dtypes[entry.megatron]
    return dtype


def _large_items_first(file: _File, form: Form) -> None:
    """Sort tensors by item size, as SafetensorsWriter requires. The sort is stable."""

    def itemsize(name: str) -> int:
        return -file.specs[name].dtype.itemsize

    file.groups.sort(key=lambda group: itemsize(next(iter(written_shapes(group[0], form)))))
    file.specs = {name: file.specs[name] for name in sorted(file.specs, key=itemsize)}


def _write_config(path: Path, dtype: torch.dtype, *, unties: bool) -> None:
    """Complete config.json for servers, and set its dtype to the dtype of the weights, because
    training may have changed it. unties: the weights have a separate head, although config.json
    ties it to the embedding.
    """
    before = json.loads(path.read_bytes())
    config = copy.deepcopy(before)
    if before["model_type"] not in AUTHORS:
        config = copy.deepcopy(family(before["model_type"]).served_config(before))
    for section, key in dtype_keys(config):
        section[key] = str(dtype).removeprefix("torch.")
    if unties:
        untie(config)
    if config != before:
        path.write_text(json.dumps(config, indent=2) + "\n")

"""Adapters of a step, in the format that training saves and loads.

    LINEAR.lora_A           [sum of ranks, columns]: A of the projections, concatenated
    LINEAR.lora_B_<part>    [rows, rank]: B of each projection

Experts are stacked in a leading dim, as their weights are. Other settings are in `lora.json`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.lora.adapters import (
    AdapterPairs,
    Pair,
    Projection,
    linears,
    lora_targets,
)
from checkpoint_tools.weights import Weights
from megavlm.checkpointing.adapter_settings import AdapterSettings
from megavlm.checkpointing.folder import LORA_SETTINGS
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Shape


@dataclass(frozen=True)
class StepTensor:
    """A tensor of a step, or one expert's row of it. shape: shape of the whole tensor."""

    key: str
    expert: int | None
    shape: Shape
    tensor: Tensor


def has_adapters(weights: Weights) -> bool:
    return any(is_adapter(name) for name, *_ in weights.extras)


def describe_adapters(weights: Weights) -> dict[str, Any]:
    """Return rank, alpha, base model and targets. Alpha and base are None if not recorded."""
    whole = linears(weights)
    adapted = {name.rpartition(".")[0] for name, *_ in weights.extras if is_adapter(name)}
    known = recorded_settings(weights.path)
    return {
        "rank": _rank(weights),
        "alpha": known.get("alpha"),
        "base": known.get("base"),
        "targets": lora_targets([linear for linear in whole if linear in adapted], whole),
    }


def step_adapters(
    weights: Weights, *, alpha: float | None = None, base: str | None = None
) -> AdapterPairs:
    """Open the adapters of a step. `alpha` and `base` (name or folder) override recorded values.

    Raises ValueError if the step has none, if they do not fit its model, or if alpha is unknown.
    """
    reader, path = weights.reader, weights.path
    if reader is None or not has_adapters(weights):
        raise ValueError(f"{path} holds no adapters.")
    found = {name: (shape, dtype) for name, shape, dtype in weights.extras if is_adapter(name)}
    adapted = {key: parts for key, parts in linears(weights).items() if f"{key}.lora_A" in found}
    expected = {key for linear, parts in adapted.items() for key, _ in _names(linear, parts)}
    if unlike := found.keys() ^ expected:
        raise ValueError(f"{path} has adapters that are not its model's: {min(unlike)}.")
    rank = _rank(weights)
    for linear, parts in adapted.items():
        for key, shape in _shapes(linear, parts, rank):
            if found[key][0] != shape:
                raise ValueError(
                    f"{key} in {path} has shape {found[key][0]}; its model makes it {shape}."
                )
    known = recorded_settings(path)
    if alpha is None:
        alpha = known.get("alpha")
    if alpha is None:
        raise ValueError(
            f"{path} does not record the alpha of its adapters (no {LORA_SETTINGS}): give --alpha."
        )
    if not isfinite(alpha):
        raise ValueError(f"{path}: adapters cannot have alpha {alpha}; it must be finite.")

    def read(projection: Projection) -> Pair:
        a = reader.read(f"{projection.linear}.lora_A", projection.expert)
        names = [one.part for one in adapted[projection.linear] if one.expert == projection.expert]
        a = a.split(rank)[names.index(projection.part)]
        return a, reader.read(f"{projection.linear}.lora_B_{projection.part}", projection.expert)

    dtypes = [dtype for _, dtype in found.values()]
    dtype = dtypes[0]
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    return AdapterPairs(path, rank, alpha, dtype, adapted, read, base or known.get("base"))


def adapter_tensors(adapters: AdapterPairs) -> Iterator[StepTensor]:
    """Yield the tensors of the adapters in a step's format, with experts one by one."""
    for linear, parts in adapters.linears.items():
        shapes = dict(_shapes(linear, parts, adapters.rank))
        for expert, group in groupby(parts, key=lambda projection: projection.expert):
            pairs = {projection.part: adapters.read(projection) for projection in group}
            key = f"{linear}.lora_A"
            yield StepTensor(key, expert, shapes[key], torch.cat([a for a, _ in pairs.values()]))
            for part, (_, b) in pairs.items():
                key = f"{linear}.lora_B_{part}"
                yield StepTensor(key, expert, shapes[key], b)


def _rank(weights: Weights) -> int:
    ranks = {shape[-1] for name, shape, _ in weights.extras if "lora_B_" in name}
    if len(ranks) != 1:
        raise ValueError(
            f"{weights.path} holds adapters of ranks {sorted(ranks)}: one rank is expected."
        )
    (rank,) = ranks
    return rank


def recorded_settings(step: Path) -> dict[str, Any]:
    """Return the recorded AdapterSettings of a step as a dict, empty if there are none."""
    settings = AdapterSettings.read(step)
    return asdict(settings) if settings else {}


def _names(linear: str, parts: list[Projection]) -> Iterator[tuple[str, list[Projection]]]:
    """Yield the keys of a linear's tensors, and the projections (of one expert) in each."""
    one = [projection for projection in parts if projection.expert == parts[0].expert]
    yield f"{linear}.lora_A", one
    for projection in one:
        yield f"{linear}.lora_B_{projection.part}", [projection]


def _shapes(linear: str, parts: list[Projection], rank: int) -> Iterator[tuple[str, Shape]]:
    count = parts[0].num_experts
    stack = () if count is None else (count,)
    for key, projections in _names(linear, parts):
        if key.endswith("lora_A"):
            yield key, (*stack, rank * len(projections), parts[0].columns)
        else:
            yield key, (*stack, projections[0].rows, rank)

"""Tables of the contents of a HuggingFace folder or a checkpoint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from checkpoint_tools.export_hf import untrained_part
from checkpoint_tools.lora.step_adapters import describe_adapters, has_adapters
from checkpoint_tools.safetensors_io import Spec
from checkpoint_tools.weights import Weights
from megavlm.models.common.loading import written_shapes
from megavlm.models.common.lora_linear import is_adapter
from megavlm.models.common.mapping import Shape
from megavlm.models.sizes import ParameterSize


@dataclass(frozen=True)
class ComponentSize:
    """Numbers of tensors, parameters and bytes of one part of a model. dtypes: bytes by dtype."""

    name: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: dict[str, int]


def weights_components(weights: Weights) -> list[ComponentSize]:
    """Return the size of each part in the order of the model, adapters last."""
    found: dict[str, list[Spec]] = defaultdict(list)
    for key, shape, dtype in _tensors(weights):
        size = ParameterSize(key, shape, dtype, trained=False, pieces=1)
        found["adapters" if is_adapter(key) else size.component].append(Spec(dtype, shape))
    return [component_size(name, specs) for name, specs in found.items()]


def component_size(name: str, specs: Iterable[Spec]) -> ComponentSize:
    specs = list(specs)
    dtypes: dict[str, int] = defaultdict(int)
    for spec in specs:
        dtypes[_name(spec.dtype)] += spec.nbytes
    parameters = sum(prod(spec.shape) for spec in specs)
    return ComponentSize(name, len(specs), parameters, sum(dtypes.values()), dict(dtypes))


def weights_summary(weights: Weights) -> dict[str, Any]:
    """Return everything that `inspect` shows about weights, as JSON-serializable values."""
    parts = weights_components(weights)
    step = weights.manifest
    return {
        "path": str(weights.path),
        "kind": "checkpoint" if step else "HuggingFace folder",
        "family": weights.config.model_type,
        "step": step.step if step else None,
        "layout": step.layout if step else None,
        "has_optimizer": step.has_optimizer if step else None,
        "parameters": sum(part.parameters for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "hf_tensors": len(
            {
                name
                for group in weights.groups.values()
                for entry in group
                for name in written_shapes(entry, weights.experts)
            }
        )
        + len(untrained_part(weights)),
        "components": [vars(part) for part in parts],
        "adapters": describe_adapters(weights) if has_adapters(weights) else None,
    }


def mapping_rows(weights: Weights) -> Iterator[dict[str, Any]]:
    """Yield for each Megatron tensor its HuggingFace tensors and how tensor parallelism splits it.
    Shapes and dims include the dim of stacked experts.
    """
    for key, group in weights.groups.items():
        shard = group[0].shard
        stacked = int(group[0].expert is not None)
        yield {
            "megatron": key,
            "shape": list(group[0].checkpoint_shape),
            "dtype": _name(weights.dtypes[key]),
            "cut": None if shard.dim is None else {**vars(shard), "dim": shard.dim + stacked},
            "hf": list(group[0].hf),
            "experts": len(group) if stacked else None,
        }


def weights_table(weights: Weights) -> RenderableType:
    facts = weights_summary(weights)
    rows = {facts["kind"]: facts["path"], "family": facts["family"]}
    if weights.manifest is not None:
        cut = ", ".join(f"{axis} {size}" for axis, size in facts["layout"].items() if size > 1)
        rows["step"] = str(facts["step"])
        rows["saved under"] = cut or ("one rank" if facts["layout"] else "no layout")
        rows["optimizer"] = "saved" if facts["has_optimizer"] else "none"
    if known := facts["adapters"]:
        alpha = "unknown" if known["alpha"] is None else f"{known['alpha']:g}"
        rows["adapters"] = f"rank {known['rank']}, alpha {alpha}"
        rows["on"] = ", ".join(known["targets"])
    rows["HuggingFace tensors"] = f"{facts['hf_tensors']:,}, which export writes"
    return component_table(rows, weights_components(weights))


def component_table(rows: Mapping[str, str], parts: Sequence[ComponentSize]) -> RenderableType:
    """Lay out general facts above a table of parts and their sum."""
    head = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    for name, value in rows.items():
        head.add_row(name, escape(value))
    body = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    body.add_column("component")
    for name in ("tensors", "parameters", "MB", "dtypes"):
        body.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        body.add_row(*_cells(part), end_section=part is parts[-1])
    total = ComponentSize(
        "all",
        sum(part.tensors for part in parts),
        sum(part.parameters for part in parts),
        sum(part.bytes for part in parts),
        {dtype: 0 for part in parts for dtype in part.dtypes},
    )
    body.add_row(*_cells(total), style="bold")
    return Group(head, body)


def mapping_table(weights: Weights) -> RenderableType:
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Megatron", "shape", "cut", "HuggingFace"):
        rows.add_column(name, overflow="fold")
    for row in mapping_rows(weights):
        cut = row["cut"]
        parts = f" in {cut['parts']} parts" if cut and cut["parts"] > 1 else ""
        rows.add_row(
            row["megatron"],
            " x ".join(map(str, row["shape"])),
            f"dim {cut['dim']}{parts} over {cut['axis']}" if cut else "-",
            "\n".join(row["hf"]),
        )
    return rows


def _tensors(weights: Weights) -> Iterator[tuple[str, Shape, torch.dtype]]:
    for key, group in weights.groups.items():
        yield key, group[0].checkpoint_shape, weights.dtypes[key]
    yield from weights.extras


def _cells(part: ComponentSize) -> list[str]:
    return [
        part.name,
        f"{part.tensors:,}",
        f"{part.parameters:,}",
        f"{part.bytes / 1e6:,.1f}",
        ", ".join(part.dtypes),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

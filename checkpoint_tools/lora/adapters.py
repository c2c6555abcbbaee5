"""Adapters of a model as pairs (A, B) of its HuggingFace projections, from any format on disk.

The weight of an adapted projection is W + scale B A with scale = alpha / rank. Shapes:
A [rank, columns], B [rows, rank].
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.weights import Weights
from megavlm.models.common.components import lora_component
from megavlm.models.common.loading import MEMORY, stack_shape
from megavlm.models.common.mapping import PART_PREFIX, Entry

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Projection:
    """A HuggingFace projection.

    linear: checkpoint key of the linear that contains it, without `.weight`. module: its name in
    transformers 5, in the class of the trained model, with experts named as modules
    (`...mlp.experts.3.gate_proj`).
    """

    linear: str
    module: str
    rows: int
    columns: int
    expert: int | None = None
    num_experts: int | None = None

    @property
    def part(self) -> str:
        """Name within the linear."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class AdapterPairs:
    """Adapters of a model.

    path: the folder that holds them. linears: the adapted linears, each with all of its projections
    in the order of the mapping. read: function that returns the pair of a projection. base: name or
    path of the model on which they were trained.
    """

    path: Path
    rank: int
    alpha: float
    dtype: torch.dtype
    linears: Mapping[str, list[Projection]]
    read: Callable[[Projection], Pair]
    base: str | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def projections(self) -> Iterator[Projection]:
        for group in self.linears.values():
            yield from group

    def nbytes(self, projection: Projection) -> int:
        return self.rank * (projection.rows + projection.columns) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(projection) for projection in self.projections())


_IN_MEMORY = (
    "model.language_model.",
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def module_name(name: str) -> str:
    """Return transformers 5's name of a module or tensor, given any naming of its families. In a
    folder of several models it has no prefix of the trained one.
    """
    name = name.removeprefix(PART_PREFIX)
    for old, new in (
        *((part, part) for part in _IN_MEMORY),
        *((part.removeprefix("model."), part) for part in _IN_MEMORY[1:]),
        ("language_model.model.", "model.language_model."),
        ("language_model.", "model.language_model."),
        ("model.", "model.language_model."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def linears(weights: Weights) -> dict[str, list[Projection]]:
    """Return the projections of every linear of a model that can be adapted."""
    found: dict[str, list[Projection]] = defaultdict(list)
    for entry in weights.entries():
        linear = entry.megatron.removesuffix(".weight")
        if lora_component(linear) and linear != entry.megatron and len(entry.megatron_shape) == 2:
            found[linear] += _projections(linear, entry)
    return found


def lora_targets(adapted: Iterable[str], whole: Iterable[str]) -> list[str]:
    """Return the value of `lora.targets` that adapts these linears of the whole model: components,
    paths with a wildcard for the layer, or single paths.
    """
    left, whole = {_trained_name(x) for x in adapted}, [_trained_name(x) for x in whole]
    found = []
    for name in (lambda x: lora_component(_saved_name(x)) or x, _any_layer, str):
        groups: dict[str, set[str]] = defaultdict(set)
        for linear in whole:
            groups[name(linear)].add(linear)
        for target, group in groups.items():
            if group <= left:
                found.append(target)
                left -= group
    return found


def merged_weights(weights: Weights, adapters: AdapterPairs) -> Weights:
    """Return the weights with the adapters merged. Adapted tensors are returned in fp32, so that
    the caller rounds them only once.
    """
    found = {
        (linear, expert): list(group)
        for linear, projections in adapters.linears.items()
        for expert, group in groupby(projections, key=lambda projection: projection.expert)
    }

    def read(entry: Entry) -> Tensor:
        base = weights.read(entry)
        group = found.get((entry.megatron.removesuffix(".weight"), entry.expert))
        if group is None or not entry.megatron.endswith(".weight"):
            return base
        return base.float() + _added(entry, [adapters.read(one) for one in group], adapters.scale)

    kept = tuple(extra for extra in weights.extras if extra[0].startswith("value_head."))
    return replace(weights, read=read, extras=kept)


def _added(entry: Entry, pairs: list[Pair], scale: float) -> Tensor:
    """Return the sum of the adapters' products in the layout of the Megatron tensor, in fp32."""
    products = [(b.float() * scale) @ a.float() for a, b in pairs]
    if entry.expert is not None:  # the hub's stacks hold gate and up in one tensor
        together = torch.cat(products)
        products = [together.t() if entry.transposed else together]
    return entry.to_megatron(products)


def _projections(linear: str, entry: Entry) -> Iterator[Projection]:
    if entry.expert is None:
        for name, (rows, columns) in zip(entry.hf, entry.hf_shapes, strict=True):
            yield Projection(linear, _written(name.removesuffix(".weight")), rows, columns)
        return
    (stack,), (shape,) = entry.hf, entry.hf_shapes
    count, rows, columns = stack_shape(entry, shape, MEMORY)
    layer, _, kind = _written(stack).rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for part in parts:
        module = f"{layer}.{entry.expert}.{part}"
        yield Projection(linear, module, rows // len(parts), columns, entry.expert, count)


def _written(name: str) -> str:
    """Return the name of a module in the class that holds the trained model alone."""
    alone = name.removeprefix(PART_PREFIX)
    return module_name(name) if alone == name else alone


def _trained_name(linear: str) -> str:
    """Return the name of a linear in `lora.targets`. The experts of a layer share one name."""
    return linear.replace(".experts.experts.", ".experts.")


def _saved_name(linear: str) -> str:
    return linear.replace(".experts.", ".experts.experts.")


def _any_layer(linear: str) -> str:
    return re.sub(r"\.(layers|blocks|deepstack_merger_list)\.\d+\.", r".\1.*.", linear)

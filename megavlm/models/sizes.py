"""Parameters that each rank of a layout holds, exactly, without a cluster and without memory.

The model is built as in a run, on the meta device, by a rank of a fake process group
(`parallel.fake`). Not covered: activations, gradients, optimizer states.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.models.build import build_model
from megavlm.models.common.components import ModelPart, model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import LocalTensor, local_tensors
from megavlm.models.common.lora import add_adapters
from megavlm.models.registry import family
from megavlm.parallel.fake import fake_rank, without_memory
from megavlm.parallel.mesh import Layout, build_mesh, check_world

LAYER_KINDS = ("moe_layer_freq", "linear_attention_freq")  # which layers have what, 0 or 1 of each


@dataclass(frozen=True)
class ParameterSize:
    """Parameter as one rank holds it. `name`: its key in checkpoints, with the number that a layer
    has in the whole model; of an expert with the expert's number, `...mlp.experts.5...`.

    `pieces`: number of different tensors of this shape that the ranks of its pipeline stage hold in
    its place, as cut over the tensor axis and, for experts, as spread over the expert axis. So the
    sum of `numel` x `pieces` over one rank of each stage, each name once, is the whole model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    pieces: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def component(self) -> ModelPart:
        """Part of the model (`components.model_part`); the tower's with its mergers."""
        name = model_part(self.name)
        return "tower" if name == "merger" else name


@dataclass(frozen=True)
class Size:
    """Number of parameters and their bytes; `trained`: parameters that are not frozen."""

    parameters: int
    bytes: int
    trained: int


@dataclass(frozen=True)
class EqualRanks:
    """Ranks that hold tensors of the same shapes, and the first rank's parameters."""

    ranks: range
    parameters: list[ParameterSize]


def rank_parameters(
    hf_config: Any,
    layout: Layout,
    world_size: int,
    rank: int,
    options: ModelOptions | None = None,
    lora: LoRA | None = None,
) -> list[ParameterSize]:
    """Return every parameter that rank `rank` of `world_size` holds. `hf_config`: transformers'
    configuration. Only for a process without a process group (`fake_rank`).

    Raises ValueError for a layout that the world size or the model does not fit.
    """
    check_world(layout, world_size)
    with fake_rank(rank, world_size):
        mesh = build_mesh(layout)
        # Over this group the last stage would receive tied embeddings, which have no data here.
        mesh.groups.embd = None
        with without_memory():
            chunks = build_model(hf_config, mesh, options)
            for chunk in chunks:
                if lora is not None:
                    add_adapters(chunk, lora)
        return [_size(held, layout) for chunk in chunks for held in local_tensors(chunk)]


def equal_ranks(
    hf_config: Any,
    layout: Layout,
    world_size: int,
    options: ModelOptions | None = None,
    lora: LoRA | None = None,
) -> Iterator[EqualRanks]:
    """Yield all ranks in groups that hold the same shapes: those of a pipeline stage, since every
    other axis cuts evenly, joined with neighbouring stages of the same shapes.

    Raises ValueError as `rank_parameters` does.
    """
    per_stage = world_size // layout.pipeline
    architecture = family(hf_config.model_type).architecture(hf_config)
    alternates = any(len({*architecture.get(name, ())}) > 1 for name in LAYER_KINDS)
    found: EqualRanks | None = None
    parameters: list[ParameterSize] = []
    for first in range(0, world_size, per_stage):  # the pipeline is megatron-core's slowest axis
        is_like_the_last = per_stage < first < world_size - per_stage and not alternates
        if not is_like_the_last:  # of stages between the ends, equally many layers of one kind
            parameters = rank_parameters(hf_config, layout, world_size, first, options, lora)
        ranks = range(first, first + per_stage)
        if found is not None and _shapes(found.parameters) == _shapes(parameters):
            found = EqualRanks(range(found.ranks.start, ranks.stop), found.parameters)
            continue
        if found is not None:
            yield found
        found = EqualRanks(ranks, parameters)
    assert found is not None
    yield found


def by_component(parameters: Iterable[ParameterSize]) -> dict[ModelPart, Size]:
    """Sum each component, in the order of their first parameters."""
    groups: dict[ModelPart, list[ParameterSize]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.component, []).append(parameter)
    return {component: total(group) for component, group in groups.items()}


def total(parameters: Iterable[ParameterSize]) -> Size:
    """Sum all parameters."""
    everything = [*parameters]
    return Size(
        parameters=sum(x.numel for x in everything),
        bytes=sum(x.bytes for x in everything),
        trained=sum(x.numel for x in everything if x.trained),
    )


def _size(held: LocalTensor, layout: Layout) -> ParameterSize:
    name, tensor, is_expert = held.key, held.data, held.expert is not None
    if is_expert:
        name = name.replace(".experts.experts.", f".experts.{held.expert}.")
    size = layout.expert_tensor if is_expert else layout.tensor
    pieces = (size if _is_cut(tensor) else 1) * (layout.expert if is_expert else 1)
    return ParameterSize(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, pieces)


def _is_cut(tensor: Tensor) -> bool:
    """Return True for megatron-core's mark of a parameter that the tensor axis cuts."""
    return getattr(tensor, "partition_dim", -1) >= 0


def _shapes(parameters: list[ParameterSize]) -> list[tuple[Any, ...]]:
    return [(x.component, x.shape, x.dtype, x.trained, x.pieces) for x in parameters]

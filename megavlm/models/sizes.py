"""Exact parameters that each rank of a layout holds, computed without a cluster and without memory.

The model is built as in a run, but on the meta device and by a rank of a fake process group
(`parallel.fake`). Not covered: activations, gradients, optimizer states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.components import ModelPart, model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import LocalTensor, local_tensors
from megavlm.models.common.lora import add_adapters
from megavlm.parallel.fake import fake_rank, without_memory
from megavlm.parallel.mesh import Layout, build_mesh

LAYER_KINDS = ("moe_layer_freq", "linear_attention_freq")  # lists with 0 or 1 for each layer


@dataclass(frozen=True)
class ParameterSize:
    """Parameter as one rank holds it.

    name: Its key in checkpoints, with the layer's number in the whole model. The name of an
        expert's parameter has the expert's number, `...mlp.experts.5...`.
    pieces: Number of different tensors of this shape that the ranks of the pipeline stage hold for
        it, because the tensor axis cuts it and the expert axis distributes experts. Therefore the
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
        """Part of the model (`components.model_part`); mergers count as part of the tower."""
        name = model_part(self.name)
        return "tower" if name == "merger" else name


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
    """Return every parameter that rank `rank` of `world_size` holds. Only for a process without a
    process group (`fake_rank`).

    hf_config: transformers' configuration.

    Raises ValueError for a layout that does not fit the world size or the model.
    """
    with fake_rank(rank, world_size):
        mesh = build_mesh(layout)
        # The last stage would receive tied embeddings over this group, but there is no data here.
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
    """Yield all ranks in groups that hold tensors of the same shapes. A group is the ranks of a
    pipeline stage, since every other axis cuts evenly, or of consecutive stages with equal shapes.

    Raises ValueError as `rank_parameters` does.
    """
    per_stage = world_size // layout.pipeline
    architecture = family(hf_config.model_type).architecture(hf_config)
    alternates = any(len({*architecture.get(name, ())}) > 1 for name in LAYER_KINDS)
    found: EqualRanks | None = None
    parameters: list[ParameterSize] = []
    for first in range(0, world_size, per_stage):  # the pipeline is megatron-core's slowest axis
        is_like_the_last = per_stage < first < world_size - per_stage and not alternates
        if not is_like_the_last:  # stages between the ends have equally many layers of one kind
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


def _size(held: LocalTensor, layout: Layout) -> ParameterSize:
    name, tensor, is_expert = held.key, held.data, held.expert is not None
    if is_expert:
        name = name.replace(".experts.experts.", f".experts.{held.expert}.")
    size = layout.expert_tensor if is_expert else layout.tensor
    pieces = (size if _is_cut(tensor) else 1) * (layout.expert if is_expert else 1)
    return ParameterSize(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, pieces)


def _is_cut(tensor: Tensor) -> bool:
    """Return True if megatron-core marks a parameter as cut over the tensor axis."""
    return getattr(tensor, "partition_dim", -1) >= 0


def _shapes(parameters: list[ParameterSize]) -> list[tuple[Any, ...]]:
    return [(x.component, x.shape, x.dtype, x.trained, x.pieces) for x in parameters]

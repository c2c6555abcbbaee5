"""The `parallel` section: ranks per axis of the trainer's layout."""

import math
from dataclasses import dataclass
from typing import Any

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class Parallel(Section):
    """Ranks of the trainer along each axis, as in megatron-core."""

    tensor: int = bounded(1, least=1)
    """Tensor-parallel ranks, over which heads, MLP rows and the vocabulary are split. The number
    must divide the number of key-value heads or be a multiple of it."""

    sequence: bool = False
    """Also split the activations between tensor-parallel layers over the tensor axis (sequence
    parallelism, arXiv 2205.05198). It saves memory and needs `parallel.tensor` above 1."""

    context: int = bounded(1, least=1)
    """Context-parallel ranks, over which the tokens of a packed sequence are split."""

    pipeline: int = bounded(1, least=1)
    """Pipeline stages, over which the layers are split. The vision tower is on the first."""

    virtual: int = bounded(1, least=1)
    """Chunks of layers per pipeline stage (interleaved schedule, arXiv 2104.04473). More chunks
    mean smaller pipeline bubbles and more communication."""

    first_stage_layers: int | None = bounded(None, least=1)
    """Layers of the first pipeline stage, which also holds the tower and the embedding. Null splits
    layers evenly."""

    last_stage_layers: int | None = bounded(None, least=1)
    """Layers of the last pipeline stage, which also computes log-probs. Null splits layers
    evenly."""

    expert: int = bounded(1, least=1)
    """Expert-parallel ranks, over which the experts of a layer are distributed. The axis divides
    the ranks of a pipeline stage and affects the experts only."""

    expert_tensor: int = bounded(1, least=1)
    """Tensor-parallel ranks of each expert, used for experts instead of `parallel.tensor`."""

    data: int | None = bounded(None, least=1)
    """Data-parallel ranks. Null derives the number from the world size and the other axes; when
    `megavlm train` starts the ranks itself, it starts the fewest that the other axes allow."""

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model and share one microbatch."""
        return self.tensor * self.context * self.pipeline

    @property
    def num_ranks(self) -> int:
        """World size that `megavlm train` starts."""
        data = self.data or 1
        while self.data is None and (self.model_size * data) % self.expert_ranks:
            data += 1
        return self.model_size * data

    @property
    def expert_ranks(self) -> int:
        """Smallest number of ranks that the expert and pipeline axes need; the world size is a
        multiple of it.
        """
        return self.expert * self.expert_tensor * self.pipeline

    def check(self) -> None:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true splits activations over the tensor-parallel ranks, but "
                "parallel.tensor=1 has only one: set parallel.tensor above 1 or "
                "parallel.sequence=false"
            )
        if self.pipeline == 1:
            unused = {"virtual": 1, "first_stage_layers": None, "last_stage_layers": None}
            for key, default in unused.items():
                value = getattr(self, key)
                if value != default:
                    raise ValueError(
                        f"parallel.{key}={value} is about pipeline stages, but "
                        "parallel.pipeline=1 has none: remove it or raise parallel.pipeline"
                    )
        if self.data is not None:
            check_world(self, self.num_ranks)


def check_world(layout: Any, world_size: int) -> None:
    """Raise ValueError if `world_size` ranks cannot be arranged in the layout. layout: Has the axes
    of Parallel.
    """
    for axes in (("tensor", "context", "pipeline"), ("expert", "expert_tensor", "pipeline")):
        sizes = [getattr(layout, axis) for axis in axes]
        if world_size % math.prod(sizes):
            product = " x ".join(f"parallel.{a}={n}" for a, n in zip(axes, sizes, strict=True))
            raise ValueError(
                f"{product} does not divide the world size {world_size}: "
                f"start a multiple of {math.prod(sizes)} ranks or change the layout"
            )

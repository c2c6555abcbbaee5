"""Adapters of experts that megatron-core computes together (TEGroupedMLP).

A and B of all experts of a rank are one tensor each, and A x and B A x are one grouped matrix
product each.

Shapes: E experts of this rank; the others as in `lora_linear`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import Tensor, nn

from megavlm.models.common.lora_linear import (
    Adapter,
    LoRALinear,
    LoRAPart,
    Placement,
    merged,
)

ALIGNMENT = 16  # bytes; the grouped product needs strides of a multiple of it


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks that share experts.

    expert: The ranks that hold different experts.
    copies: The ranks that hold the same experts.
    """

    expert: dist.ProcessGroup
    copies: dist.ProcessGroup


class GroupedLoRALinear(LoRALinear):
    """Adapted linear layers of all experts of this rank, which replace `base` (TEGroupedLinear).

    The tensors are `lora_A` [E, R, columns] and `lora_B_<part>` [E, rows, rank]. Checkpoints hold
    them as they hold the tensors of experts that are computed one by one.
    """

    def __init__(self, base: Any, *, ranks: ExpertRanks, **options: Any) -> None:
        """Initialise the adapters. The other options are as in LoRALinear, with the name that the
        layers of all experts share (`...mlp.experts.linear_fc1`).
        """
        self.ranks = ranks  # which names the experts that A is drawn for
        super().__init__(base, **options)

    @property
    def weight(self) -> Tensor:
        return self.base.weight0

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        for index, name in enumerate(self._names()):
            yield name, ExpertAdapter(self, index)

    def forward(  # type: ignore[override]
        self, x: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Map x [T, columns], sorted by expert, to [T, rows]. sizes: [E] number of tokens of each
        expert, on the host.
        """
        output, bias = self.base(x, sizes)
        if not self.enabled:
            return output, bias
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.to(x.device, non_blocking=True)
        a, up = self._factors()
        padding = -a.size(1) % (ALIGNMENT // a.itemsize)
        if padding:
            a, up = F.pad(a, (0, 0, 0, padding)), F.pad(up, (0, padding))
        down = grouped_linear(self._drop(x), a, ends)
        return output + grouped_linear(down, up, ends), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        state = self.base.sharded_state_dict(prefix, sharded_offsets, metadata)
        group, (expert, copies) = self.placement.group, (self.ranks.expert, self.ranks.copies)
        first = len(sharded_offsets)
        for key, parameter in self.named_parameters(recurse=False):
            offsets, dim = [(first, expert.rank(), expert.size())], self._cut_dim(key)
            if dim is not None:
                # dim may be negative: -1 of [E, R, columns] is dim 2, behind the prepended axes.
                offsets.append((first + dim % 3, group.rank(), group.size()))
            state[f"{prefix}{key}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{key}",
                parameter,
                *sharded_offsets,
                *offsets,
                replica_id=(0, group.rank() if dim is None else 0, copies.rank()),
                prepend_axis_num=first,
            )
        return state

    def _initialise(self, seed: int) -> None:
        weights = [self.base.get_parameter(f"weight{i}") for i in range(self.base.num_gemms)]
        drawn = [
            self._drawn_a(name, weight, seed)
            for name, weight in zip(self._names(), weights, strict=True)
        ]
        self.lora_A = nn.Parameter(torch.stack(drawn))
        for part in self.parts:
            if part.rank:
                zeros = self.weight.new_zeros(len(weights), part.rows, part.rank)
                self.register_parameter(f"lora_B_{part.name}", nn.Parameter(zeros))

    def _names(self) -> list[str]:
        experts, _, linear = self.name.rpartition(".")
        count = self.base.num_gemms
        first = self.ranks.expert.rank() * count
        return [f"{experts}.{first + index}.{linear}" for index in range(count)]


@dataclass(frozen=True)
class ExpertAdapter:
    """Adapter of one expert of this rank, with the interface of a LoRALinear."""

    layer: GroupedLoRALinear
    index: int

    @property
    def parts(self) -> tuple[LoRAPart, ...]:
        return self.layer.parts

    @property
    def placement(self) -> Placement:
        return self.layer.placement

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.layer.base.get_parameter(f"weight{self.index}")
        return weight

    def pairs(self) -> Iterator[tuple[LoRAPart, Tensor, Tensor]]:
        for part, a, b in self.layer.pairs():
            yield part, a[self.index], b[self.index]

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        lora_B = {name: b[self.index] for name, b in self.layer.lora_B.items()}
        up = self.layer._up(lora_B, torch.float32)
        return merged(self.weight, self.layer.lora_A[self.index], up)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group in x [T, K] by its own weight in [E, N, K]; returns [T, N].

    ends: The row after each group's last [E], int32. Groups may be empty. K and N must be multiples
    of 16 bytes.
    """
    result: Tensor = _GroupedLinear.apply(x, weights, ends)
    return result


class _GroupedLinear(torch.autograd.Function):
    """torch's grouped product, whose own backward takes neither empty nor expanded gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, ends)
        return _grouped(x, weights.transpose(1, 2), ends, (len(x), weights.size(1)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_x = _grouped(gradient, weights, ends, x.shape)
        return of_x, _grouped(gradient.t(), x, ends, weights.shape), None


def _grouped(x: Tensor, y: Tensor, ends: Tensor, shape: Sequence[int]) -> Tensor:
    if 0 in (*x.shape, *y.shape):
        return x.new_zeros(shape)
    result: Tensor = F.grouped_mm(x, y, offs=ends)
    return result

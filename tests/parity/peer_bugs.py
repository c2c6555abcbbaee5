"""Bugs that other stacks have had, as changes to our own code: a small function each, and a table
of the cases that it would break.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavlm.data.packs.packing import Pack
from megavlm.models import build
from megavlm.models.common import deepstack, lora, mapping, model, vision_merge
from megavlm.models.common.lora_linear import LoRALinear
from megavlm.models.common.model import ValueHead
from megavlm.models.common.tower import Tower
from megavlm.models.qwen3_vl.vision import VisionTower
from tests.parity import cases

Patch = pytest.MonkeyPatch
Inject = Callable[[Patch], None]
VISION_HEADS = 4  # of a tiny model


def levels_in_a_list(patch: Patch) -> None:
    """1. DeepStack levels leave a recomputed region in a list, where autograd does not see them."""
    plain = VisionTower.forward

    def forward(self: VisionTower, patches: Tensor, grids: Any) -> Tensor:
        def region(patches: Tensor) -> tuple[Tensor, list[Tensor]]:
            merged, *levels = plain(self, patches, grids).chunk(1 + self.num_levels, dim=1)
            return merged, levels

        patches = patches.clone().requires_grad_()
        merged, levels = checkpoint(region, patches, use_reentrant=True)
        return torch.cat([merged, *levels], dim=1)

    patch.setattr(VisionTower, "forward", forward)


def leaf_names(patch: Patch) -> None:
    """2. Adapters go wherever a linear has one of a few names, the tower included."""
    leaves = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}

    def choose(targets: Sequence[str], names: Mapping[str, str], *, has_tower: bool) -> set[str]:
        return {name for name in names if name.rpartition(".")[2] in leaves}

    patch.setattr(lora, "choose", choose)


def vision_qkv_by_head(patch: Patch) -> None:
    """2. The tower's fused rows are exported as if each head's q, k and v lay together."""
    plain = LoRALinear.merged_weight

    def merged_weight(self: LoRALinear) -> Tensor:
        weight = plain(self)
        if not self.name.startswith("visual.") or not self.name.endswith(".qkv"):
            return weight
        return weight.unflatten(0, (VISION_HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)

    patch.setattr(LoRALinear, "merged_weight", merged_weight)


def tanh_gelu(patch: Patch) -> None:
    """3. The merger's GELU by tanh. Nothing but mergers has the module."""
    patch.setattr(nn.GELU, "forward", lambda self, x: F.gelu(x, approximate="tanh"))


def slice_without_sum(patch: Patch) -> None:
    """4. Backward of the gather of features takes what a rank gave, and of that only the part of
    the gradient that this rank has.
    """

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.start : ctx.start + ctx.count], None, None, None

    patch.setattr(vision_merge._GatherShares, "backward", staticmethod(backward))


def scaled_scatter(patch: Patch) -> None:
    """5. The scatter to the sequence-parallel region divides gradients by the number of ranks."""
    plain = model.scatter_to_sequence_parallel_region

    def scatter(x: Tensor, *, group: Any) -> Tensor:
        x = plain(x, group=group)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / group.size())
        return x

    patch.setattr(model, "scatter_to_sequence_parallel_region", scatter)


def one_ulp(patch: Patch) -> None:
    """6. A conversion that changes one number by the least that bf16 can."""
    plain = mapping._interleave

    def interleave(num_groups: int, tensors: Sequence[Tensor]) -> Tensor:
        fused = plain(num_groups, tensors)
        if fused.dtype == torch.bfloat16:  # else these are the shapes alone
            fused.view(-1)[:1].view(torch.int16).add_(1)
        return fused

    patch.setattr(mapping, "_interleave", interleave)


def first_chunk_only(patch: Patch) -> None:
    """7. Levels for layers beyond the first stage, or its first chunk, are not added."""
    plain = deepstack.StageLayout.level

    def level(self: deepstack.StageLayout, levels: Tensor, index: int) -> Tensor:
        return plain(self, levels, index) * (self.first_level == 0)

    patch.setattr(deepstack.StageLayout, "level", level)


def unread_switches(patch: Patch) -> None:
    """8. Nothing reads what is to be frozen."""
    plain = build._tower

    def tower(hf_config: Any, parts: Any, options: Any) -> Tower:
        return plain(hf_config, parts, replace(options, freeze_tower=False, freeze_merger=False))

    patch.setattr(build, "_tower", tower)


def unused_head(patch: Patch) -> None:
    """9. There is a value head, and values do not come from it."""
    patch.setattr(ValueHead, "forward", lambda self, hidden: 0 * hidden.float().sum(1))


def counted_over_the_row(patch: Patch) -> None:
    """10. In a pack, a segment's positions start where those of the one before it ended."""
    plain = cases.make_pack

    def make_pack(*args: Any, **options: Any) -> Pack:
        pack = plain(*args, **options)
        bounds, start = pack.segment_bounds, 0
        pieces: list[Tensor] = []
        for first, end in pairwise(bounds):
            pieces.append(pack.positions[:, first:end] - pack.positions[0, first] + start)
            start = int(pieces[-1].max()) + 1
        return replace(pack, positions=torch.cat(pieces, dim=1))

    patch.setattr(cases, "make_pack", make_pack)


def counted_over_the_part(patch: Patch) -> None:
    """10. A context rank counts the tokens that it holds."""
    plain = Pack.part

    def part(self: Pack, context_rank: int) -> Pack:
        held = plain(self, context_rank)
        return replace(held, positions=torch.arange(len(held.token_ids)).expand(3, -1))

    patch.setattr(Pack, "part", part)


@dataclass(frozen=True)
class Bug:
    """A bug, and the case of the parity matrix that it would break."""

    number: int
    inject: Inject
    family: str
    layout: str
    inputs: str = "one image"
    options: str = ""

    def __str__(self) -> str:
        parts = (f"{self.number} {self.inject.__name__}", self.family, self.layout, self.options)
        return ", ".join(part for part in parts if part)


BUGS = [
    Bug(1, levels_in_a_list, "qwen3_vl", "one rank", options="recompute full"),
    Bug(1, levels_in_a_list, "qwen3_vl", "PP2", options="recompute full"),
    Bug(3, tanh_gelu, "qwen2_5_vl", "one rank"),
    Bug(3, tanh_gelu, "qwen3_vl", "one rank"),
    Bug(4, slice_without_sum, "qwen2_5_vl", "CP2"),
    Bug(4, slice_without_sum, "qwen3_vl", "CP2"),
    Bug(5, scaled_scatter, "qwen2_5_vl", "TP2+SP"),
    Bug(5, scaled_scatter, "qwen3_vl", "TP2+SP"),
    Bug(7, first_chunk_only, "qwen3_vl", "PP4"),
    Bug(7, first_chunk_only, "qwen3_vl", "PP2 virtual 2"),
    Bug(9, unused_head, "qwen2_5_vl", "TP2", options="shared critic"),
    Bug(9, unused_head, "qwen2_5_vl", "PP2", options="shared critic"),
    Bug(9, unused_head, "qwen2_5_vl", "CP2", options="shared critic"),
    Bug(9, unused_head, "qwen2_5_vl", "TP2", options="separate critic"),
    Bug(9, unused_head, "qwen2_5_vl", "PP2", options="separate critic"),
    Bug(9, unused_head, "qwen2_5_vl", "CP2", options="separate critic"),
    Bug(10, counted_over_the_row, "qwen3_vl", "one rank", "few images"),
    Bug(10, counted_over_the_row, "qwen3_vl", "CP2", "few images"),
    Bug(10, counted_over_the_part, "qwen2_5_vl", "CP2"),
]

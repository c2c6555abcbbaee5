"""The plan of a step: the packs of each minibatch that a rank trains on, and their images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megavlm.data.balance import assign
from megavlm.data.packing import Pack, Tree, empty_pack, make_pack
from megavlm.data.processor import ProcessedImage
from megavlm.models.cost import TreeCost
from megavlm.parallel.mesh import Mesh


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step: the packs of each minibatch, which is one update, and their
    images.
    """

    minibatches: list[list[Pack]]
    images: dict[str, ProcessedImage]
    num_targets: list[int]  # of each minibatch, on all ranks together
    num_tokens: int  # of prompts and responses, on all ranks together

    @property
    def packs(self) -> list[Pack]:
        return [pack for packs in self.minibatches for pack in packs]

    def part(self, context_rank: int, device: torch.device) -> "RankBatch":
        """Return a context rank's part of the packs, on `device`. Images are moved when they are
        encoded.
        """
        mine = [[p.part(context_rank).to(device) for p in packs] for packs in self.minibatches]
        return replace(self, minibatches=mine)


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Requirements of a layout on packs. Every context rank holds a multiple of `multiple` tokens;
    each data rank has a multiple of `count` packs, all as many if `equal_counts`.
    """

    max_tokens: int
    vision_token_ids: tuple[int, ...]
    multiple: int = 1
    context_size: int = 1
    count: int = 1
    equal_counts: bool = False


def plan_step(
    minibatches: Sequence[Sequence[Tree]],
    images: Mapping[str, ProcessedImage],
    *,
    num_ranks: int,
    shape: PackShape,
    cost: TreeCost,
) -> list[RankBatch]:
    """Return the batch of each data rank. Trees are packed and balanced by modelled cost; an image
    goes only to ranks that show it.
    """
    num_tokens = sum(tree.num_tokens for trees in minibatches for tree in trees)
    num_targets = [
        sum(len(s.token_ids) for tree in trees for s in tree.segments if s.is_target)
        for trees in minibatches
    ]
    rank_batches = [RankBatch([], {}, num_targets, num_tokens) for _ in range(num_ranks)]
    for trees in minibatches:
        ranks = [
            [
                make_pack(
                    part,
                    vision_token_ids=shape.vision_token_ids,
                    multiple=shape.multiple,
                    context_size=shape.context_size,
                )
                for part in parts
            ]
            for parts in assign(trees, num_ranks, shape.max_tokens, cost)
        ]
        _fill_up(ranks, shape)
        for rank_batch, packs in zip(rank_batches, ranks, strict=True):
            rank_batch.minibatches.append(packs)
            rank_batch.images.update({key: images[key] for pack in packs for key in pack.images})
    return rank_batches


def by_rank(rank_batches: Sequence[RankBatch], mesh: Mesh) -> list[RankBatch]:
    """Return the batch of every rank in the world. Images go to the first pipeline stage, which
    encodes them.
    """
    without_images = [replace(rank_batch, images={}) for rank_batch in rank_batches]
    return [
        (rank_batches if stage == 0 else without_images)[data_rank]
        for stage, data_rank in zip(mesh.pipeline_ranks, mesh.data_ranks, strict=True)
    ]


def _fill_up(ranks: Sequence[list[Pack]], shape: PackShape) -> None:
    """Add packs of padding where a layout needs more microbatches than there are packs."""
    longest = max(len(packs) for packs in ranks)
    columns = next(packs[0].columns for packs in ranks if packs)
    for packs in ranks:
        count = longest if shape.equal_counts else max(len(packs), 1)
        for _ in range(len(packs), -(-count // shape.count) * shape.count):
            packs.append(
                empty_pack(columns, multiple=shape.multiple, context_size=shape.context_size)
            )

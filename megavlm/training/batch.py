"""The plan of a step: the packs of each minibatch that a rank trains on, and their images."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megavlm.config.parallel import Parallel
from megavlm.data.balance import Schedule, SegmentCosts, assign
from megavlm.data.packing import Pack, Tree, empty_pack, make_pack
from megavlm.data.targets import TargetColumns
from megavlm.models.cost import ModelCost
from megavlm.parallel.collectives import Arrays, receive_from_driver, scatter, send_each
from megavlm.parallel.mesh import Layout, Mesh
from megavlm.training.step.image_plan import ImagePlan
from megavlm.training.step.rank_images import (
    ImageReader,
    ImageSource,
    RankImages,
    sources_from_arrays,
    sources_to_arrays,
)
from megavlm.training.step.tree_arrays import empty_columns, trees_from_arrays, trees_to_arrays

Minibatches = list[list[list[Tree]]]  # trees of each pack of each minibatch; none: padding


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step: the packs of each minibatch, which is one update, and their
    images.
    """

    minibatches: list[list[Pack]]
    images: RankImages
    num_targets: list[int]  # of each minibatch, on all ranks together
    num_tokens: int  # of prompts and responses, on all ranks together

    @property
    def packs(self) -> list[Pack]:
        return [pack for packs in self.minibatches for pack in packs]


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Requirements on packs. A context rank holds a multiple of `multiple` tokens."""

    vision_token_ids: tuple[int, ...]
    multiple: int = 1
    context_size: int = 1

    def pack(self, trees: Sequence[Tree], columns: TargetColumns | None) -> Pack:
        """Return a pack of trees; of none, one of padding with the fields of `columns`."""
        size = {"multiple": self.multiple, "context_size": self.context_size}
        if not trees:
            return empty_pack(columns, **size)
        return make_pack(trees, vision_token_ids=self.vision_token_ids, **size)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The driver's plan of a step, by data rank. num_tokens: of the step's trees before they were
    cut. sources: of the images that packs show, by key. tower_learns: images are encoded in each
    pack that shows them, not once.
    """

    minibatches: list[Minibatches]
    images: list[ImagePlan]
    num_tokens: int
    sources: Mapping[str, ImageSource]
    tower_learns: bool
    shape: PackShape

    def part(self, data_rank: int) -> dict[str, Tensor]:
        """Return what all ranks of a data rank get, as arrays."""
        minibatches, plan = self.minibatches[data_rank], self.images[data_rank]
        header = {
            "packs": [[len(pack) for pack in packs] for packs in minibatches],
            "num_targets": self._num_targets,
            "num_tokens": self.num_tokens,
            "tower_learns": self.tower_learns,
            "shape": asdict(self.shape),
            "images": plan.header(),
        }
        numbers = {key: number for number, key in enumerate(plan.keys)}
        content = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        trees = trees_to_arrays(_flat(minibatches), numbers, self._columns)
        return {"header": content, **trees, **plan.to_arrays()}

    def sources_of(self, data_rank: int, slot: int) -> dict[str, ImageSource]:
        """Return the sources of the images that a rank of the first pipeline stage encodes."""
        packs = [
            [key for tree in pack for key in tree.images]
            for packs in self.minibatches[data_rank]
            for pack in packs
        ]
        plan = self.images[data_rank]
        held = plan.held_by(data_rank, slot, packs if self.tower_learns else None)
        return {plan.keys[index]: self.sources[plan.keys[index]] for index in held}

    @cached_property
    def _num_targets(self) -> list[int]:
        """Targets of each minibatch, of all data ranks."""
        targets = [
            [s for trees in at_once for pack in trees for tree in pack for s in tree.segments]
            for at_once in zip(*self.minibatches, strict=True)
        ]
        return [sum(len(s.token_ids) for s in found if s.is_target) for found in targets]

    @cached_property
    def _columns(self) -> TargetColumns | None:
        """The columns of any target; all have the same fields."""
        trees = chain.from_iterable(map(_flat, self.minibatches))
        targets = (s for tree in trees for s in tree.segments if s.is_target)
        first = next(targets, None)
        return None if first is None else first.columns


def schedule_of(layout: Layout | Parallel, cost: ModelCost) -> Schedule:
    """Return how a layout runs packs of a model."""
    return Schedule(
        bubble=(layout.pipeline - 1) / layout.virtual,
        # Ranks that share experts exchange tokens in every layer of every microbatch.
        lockstep=layout.expert > 1 or layout.expert_tensor > 1,
        # Virtual stages take turns in rounds of one microbatch per stage.
        count=layout.pipeline if layout.virtual > 1 else 1,
        least_cost=cost.least_pack,
    )


def plan_step(
    minibatches: Sequence[Sequence[Tree]],
    *,
    num_ranks: int,
    max_tokens: int,
    schedule: Schedule,
    cost: SegmentCosts,
) -> list[Minibatches]:
    """Return the trees of each data rank's packs, cut and balanced by modelled time."""
    ranks: list[Minibatches] = [[] for _ in range(num_ranks)]
    for trees in minibatches:
        assigned = assign(trees, num_ranks, max_tokens, cost, schedule)
        _fill_up(assigned, schedule)
        for rank, packs in zip(ranks, assigned, strict=True):
            rank.append(packs)
    return ranks


def share_batch(
    plan: StepPlan | None, mesh: Mesh, reader: ImageReader, device: torch.device
) -> RankBatch:
    """Send each rank its share of a plan, which the driver has, and return it: its packs on
    `device`. Images stay in host memory until they are encoded. Collective.
    """
    parts = None if plan is None else [plan.part(data_rank) for data_rank in range(mesh.data_size)]
    minibatches, images, header = unpack_part(scatter(parts, mesh), mesh.context_rank, device)
    slots = mesh.layout.tensor * mesh.layout.context
    sources: dict[str, ImageSource] = {}
    if plan is not None:
        ranks = range(mesh.data_size * slots)
        each = {rank: plan.sources_of(*divmod(rank, slots)) for rank in ranks}
        sources = each.pop(0)
        send_each({rank: sources_to_arrays(its) for rank, its in each.items() if its}, mesh)
    elif mesh.pipeline_rank == 0:
        packs = [pack.images for packs in minibatches for pack in packs]
        learned = packs if header["tower_learns"] else None
        if images.held_by(mesh.data_rank, mesh.rank % slots, learned):
            sources = sources_from_arrays(receive_from_driver(mesh))
    return RankBatch(
        minibatches,
        RankImages(images, sources, reader),
        header["num_targets"],
        header["num_tokens"],
    )


def unpack_part(
    arrays: Arrays, context_rank: int, device: torch.device
) -> tuple[list[list[Pack]], ImagePlan, dict[str, Any]]:
    """Return what `StepPlan.part` holds: a context rank's part of the packs of each minibatch, on
    `device`, the plan of images, and the header.
    """
    header = json.loads(arrays["header"].numpy().tobytes())
    images = ImagePlan.of(header["images"], arrays)
    shape, columns = PackShape(**header["shape"]), empty_columns(arrays)
    trees = iter(trees_from_arrays(arrays, images.keys))
    minibatches = [
        [
            shape.pack([next(trees) for _ in range(count)], columns).part(context_rank).to(device)
            for count in counts
        ]
        for counts in header["packs"]
    ]
    return minibatches, images, header


def _fill_up(ranks: Sequence[list[list[Tree]]], schedule: Schedule) -> None:
    """Add packs of padding where a layout needs more microbatches than there are packs."""
    longest = max(len(packs) for packs in ranks)
    for packs in ranks:
        count = longest if schedule.lockstep else max(len(packs), 1)
        packs += [[]] * (-(-count // schedule.count) * schedule.count - len(packs))


def _flat(minibatches: Minibatches) -> list[Tree]:
    return [tree for packs in minibatches for pack in packs for tree in pack]


def shown_images(minibatches: Minibatches) -> list[str]:
    """Return the keys of the images that trees show, as often as they show them."""
    return [key for tree in _flat(minibatches) for key in tree.images]

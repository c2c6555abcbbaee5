"""The plan of a step: the packs of each minibatch that a rank trains on, and their images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain

from megavlm.arrays import to_bytes
from megavlm.config.parallel import Parallel
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.trees import Tree, trees_to_arrays
from megavlm.models.cost import ModelCost
from megavlm.parallel.mesh import Layout
from megavlm.training.step.image_plan import ImagePlan
from megavlm.training.step.pack_plan import Schedule, SegmentCosts, assign
from megavlm.training.step.rank_images import ImageSource

Minibatches = list[list[list[Tree]]]  # [minibatch][pack][tree]; a pack without trees is padding


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Pack padding: each context rank's token count is padded to a multiple of `multiple`."""

    vision_token_ids: tuple[int, ...]
    multiple: int = 1
    context_size: int = 1


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The driver's plan of a step or of one of its streamed batches, by data rank. num_tokens:
    Tokens of the trees before they were cut. sources: Sources of the images that packs show, by
    image key. tower_trained: If true, an image is encoded in each pack that shows it and not once
    per step. loss_scales: Factors by which the loss weights of the step's minibatches are
    multiplied in the end; None if other streamed batches of the step follow.

    Example, the tree of `Tree` in packs/trees.py, cut for two data ranks with a pack each:
        tokens of data rank 0: [9707, 11, 1879, 19, 0, 151645]
        tokens of data rank 1: [9707, 11, 1879, 40, 151645]
        num_tokens: 8
    """

    minibatches: list[Minibatches]
    images: list[ImagePlan]
    num_tokens: int
    sources: Mapping[str, ImageSource]
    tower_trained: bool
    shape: PackShape
    loss_scales: Sequence[float] | None = None

    def part(self, data_rank: int) -> bytes:
        """Serialize the packs and image plan of one data-parallel rank."""
        minibatches, plan = self.minibatches[data_rank], self.images[data_rank]
        values = {
            "packs": [[len(pack) for pack in packs] for packs in minibatches],
            "num_targets": self._num_targets,
            "num_tokens": self.num_tokens,
            "tower_trained": self.tower_trained,
            "loss_scales": self.loss_scales,
            "shape": asdict(self.shape),
            "images": vars(plan),
        }
        numbers = {key: number for number, key in enumerate(plan.keys)}
        return to_bytes(trees_to_arrays(_flat(minibatches), numbers, self._columns), values)

    def sources_of(self, data_rank: int, slot: int) -> dict[str, ImageSource]:
        """Return the sources of the images that a rank of the first pipeline stage encodes."""
        packs = [
            [key for tree in pack for key in tree.images]
            for packs in self.minibatches[data_rank]
            for pack in packs
        ]
        plan = self.images[data_rank]
        held = plan.held_by(data_rank, slot, packs if self.tower_trained else None)
        return {plan.keys[index]: self.sources[plan.keys[index]] for index in held}

    @cached_property
    def _num_targets(self) -> list[int]:
        """Target tokens of each minibatch, on all data ranks together."""
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
    """Return the schedule by which a layout runs packs of a model."""
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
    """Return the trees of each data rank's packs, cut and balanced by modelled time. A minibatch
    without trees has no packs.
    """
    ranks: list[Minibatches] = [[] for _ in range(num_ranks)]
    for trees in minibatches:
        assigned = assign(trees, num_ranks, max_tokens, cost, schedule)
        if trees:
            _fill_up(assigned, schedule)
        for rank, packs in zip(ranks, assigned, strict=True):
            rank.append(packs)
    return ranks


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

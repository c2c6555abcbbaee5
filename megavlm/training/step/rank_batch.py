"""A rank's share of a step, as the driver sends it."""

from dataclasses import dataclass
from typing import Any

import torch

from megavlm.arrays import from_bytes
from megavlm.data.packs.packing import Pack, make_packs
from megavlm.parallel.collectives import receive_from_driver, scatter, send_each
from megavlm.parallel.mesh import Mesh
from megavlm.training.step.image_plan import ImagePlan
from megavlm.training.step.rank_images import (
    ImageReader,
    ImageSource,
    RankImages,
    sources_from_bytes,
    sources_to_bytes,
)
from megavlm.training.step.step_plan import StepPlan


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a step or of one of its streamed batches: the packs of each minibatch and
    their images. Each minibatch is one update. loss_scales: See StepPlan.

    Example, data rank 0 of the example in StepPlan:
        minibatches[0][0].token_ids: [9707, 11, 1879, 19, 0, 151645]
        num_targets: [5]
        num_tokens: 8
    """

    minibatches: list[list[Pack]]
    images: RankImages
    num_targets: list[int]  # target tokens of each minibatch, on all ranks together
    num_tokens: int  # prompt and response tokens, on all ranks together
    loss_scales: list[float] | None = None

    @property
    def packs(self) -> list[Pack]:
        return [pack for packs in self.minibatches for pack in packs]


def share_batch(
    plan: StepPlan | None, mesh: Mesh, reader: ImageReader, device: torch.device
) -> RankBatch:
    """Send each rank its share of the driver's plan, and return this rank's share with its packs on
    `device`. Images stay in host memory until they are encoded. plan: The plan, on the driver; None
    on other ranks. Collective.
    """
    parts = None if plan is None else [plan.part(data_rank) for data_rank in range(mesh.data_size)]
    minibatches, images, values = unpack_part(scatter(parts, mesh), mesh.context_rank, device)
    slots = mesh.layout.tensor * mesh.layout.context
    sources: dict[str, ImageSource] = {}
    if plan is not None:
        ranks = range(mesh.data_size * slots)
        each = {rank: plan.sources_of(*divmod(rank, slots)) for rank in ranks}
        sources = each.pop(0)
        send_each({rank: sources_to_bytes(its) for rank, its in each.items() if its}, mesh)
    elif mesh.pipeline_rank == 0:
        packs = [pack.images for packs in minibatches for pack in packs]
        trained = packs if values["tower_trained"] else None
        if images.held_by(mesh.data_rank, mesh.rank % slots, trained):
            sources = sources_from_bytes(receive_from_driver(mesh))
    return RankBatch(
        minibatches,
        RankImages(images, sources, reader),
        values["num_targets"],
        values["num_tokens"],
        values["loss_scales"],
    )


def unpack_part(
    part: bytes, context_rank: int, device: torch.device
) -> tuple[list[list[Pack]], ImagePlan, dict[str, Any]]:
    """Deserialize `StepPlan.part` into this context rank's part of each minibatch's packs, on
    `device`, the image plan and the other values.
    """
    arrays, values = from_bytes(part)
    images = ImagePlan.of(values["images"])
    counts = [count for packs in values["packs"] for count in packs]
    packs = (
        pack.part(context_rank).to(device)
        for pack in make_packs(arrays, images.keys, counts, **values["shape"])
    )
    return [[next(packs) for _ in counts] for counts in values["packs"]], images, values

"""Features of the images of a step, on the first pipeline stage."""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megavlm.data.image_processing import ProcessedImage
from megavlm.data.packing import Pack
from megavlm.models.common.model import Features, VisionLanguageModel
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import count_tokens, encode_share, exchange_shares
from megavlm.training.step.rank_images import RankImages


class VisionFeatures:
    """Features of images: encoded once in a step if the tower is frozen, in each forward if it
    learns.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], images: RankImages) -> None:
        """Encode the images with a frozen tower. Collective over the first stage's ranks."""
        self._model: VisionLanguageModel = chunks[0].module
        self._groups = self._model.language_model.pg_collection
        self._images = images
        tower = self._model.visual
        self.learns = learns(tower)
        self._encoded: Features = {}
        if tower is not None and not self.learns:
            with torch.no_grad():
                self._encoded = _encode_once(tower, images, self._groups)

    @classmethod
    def everywhere(
        cls, chunks: Sequence[DistributedDataParallel], images: Mapping[str, ProcessedImage]
    ) -> Self:
        """Return the features of images that all ranks have already. Collective likewise."""
        slots = chunks[0].module.language_model.pg_collection.tp_cp.size()
        return cls(chunks, RankImages.everywhere(images, slots))

    def of(self, pack: Pack) -> Features:
        if not self.learns:
            return self._encoded
        plan = self._images.plan
        indices = plan.indices(pack.images)
        shares = plan.shares_of(indices)
        share = shares[self._groups.tp_cp.rank()]
        features = self._model.encode(
            [plan.grids[index] for index in indices],
            shares,
            [self._images.load(indices[place], keep=True) for place in share],
        )
        return {plan.keys[index]: rows for index, rows in zip(indices, features, strict=True)}


def learns(tower: Tower | None) -> bool:
    """Return True if something of a tower is trained."""
    return tower is not None and any(p.requires_grad for p in tower.parameters())


def _encode_once(
    tower: Tower, images: RankImages, groups: ProcessGroupCollection
) -> dict[str, Tensor]:
    """Return the features of all images that this data rank's packs show, each encoded on one rank.
    Collective over the ranks of the plan.
    """
    plan = images.plan
    group = groups.tp_dp_cp if plan.across else groups.tp_cp
    features: dict[str, Tensor] = {}
    for number in range(plan.num_rounds):
        indices = [i for i, its_round in enumerate(plan.rounds) if its_round == number]
        mine = [i for i in indices if plan.encoders[i] == group.rank()]
        found = exchange_shares(
            encode_share(tower, [images.load(i, keep=False) for i in mine]),
            [count_tokens(plan.grids[i], tower) for i in indices],
            [plan.encoders[i] for i in indices],
            [plan.receivers(i) for i in indices],
            group,
        )
        features |= {plan.keys[indices[place]]: rows for place, rows in found.items()}
    return features

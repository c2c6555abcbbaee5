"""Features of the images of a step, on the first pipeline stage."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.packing import Pack
from megavlm.models.common.model import Features, VisionLanguageModel
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import count_tokens, encode_share, exchange_shares
from megavlm.parallel import platform
from megavlm.training.step.rank_images import RankImages


class VisionFeatures:
    """Features of images. A frozen tower encodes them once per step, a trained tower in each
    forward.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        images: RankImages,
        device_bytes: float = math.inf,
    ) -> None:
        """Encode the images if the tower is frozen. device_bytes: Maximum bytes of features kept on
        the device; the rest is kept in host memory. Collective over the first stage's ranks.
        """
        self._model: VisionLanguageModel = chunks[0].module
        self._groups = self._model.language_model.pg_collection
        self._images = images
        tower = self._model.visual
        self.tower_trained = is_trained(tower)
        self._encoded: Features = {}
        if tower is not None and not self.tower_trained:
            with torch.no_grad():
                self._encoded = _encode_once(tower, images, self._groups, device_bytes)

    @classmethod
    def everywhere(
        cls, chunks: Sequence[DistributedDataParallel], images: Mapping[str, ProcessedImage]
    ) -> Self:
        """Return the features of images that all ranks already have. Collective over the first
        stage's ranks.
        """
        slots = chunks[0].module.language_model.pg_collection.tp_cp.size()
        return cls(chunks, RankImages.everywhere(images, slots))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the features of several streamed batches as one."""
        made = copy(parts[0])
        made._images = RankImages.joined([part._images for part in parts])
        made._encoded = {key: rows for part in parts for key, rows in part._encoded.items()}
        return made

    def of(self, pack: Pack) -> Features:
        """Return the features [its tokens, width] of each image that a pack shows, on the device of
        the pack, by image key. Collective over the tensor and context axes if the tower is trained.
        """
        if not self.tower_trained:
            device = pack.token_ids.device
            return {
                key: self._encoded[key].to(device, non_blocking=True)
                for key in dict.fromkeys(pack.images)
            }
        # A trained tower: the ranks of the tensor and context axes encode a share of the pack's
        # images each, and gather all features, with their gradients.
        plan = self._images.plan
        indices = plan.indices(pack.images)
        shares = plan.shares_of(indices)
        share = shares[self._groups.tp_cp.rank()]
        features = self._model.encode(
            [plan.grids[index] for index in indices],
            shares,
            self._images.load([indices[place] for place in share], keep=True),
        )
        return {plan.keys[index]: rows for index, rows in zip(indices, features, strict=True)}


def is_trained(tower: Tower | None) -> bool:
    """Return True if any parameter of a tower is trained."""
    return tower is not None and any(p.requires_grad for p in tower.parameters())


def _encode_once(
    tower: Tower, images: RankImages, groups: ProcessGroupCollection, device_bytes: float
) -> dict[str, Tensor]:
    """Return the features [its tokens, width] of all images that this data rank's packs show, each
    encoded on one rank.
    Features beyond `device_bytes` are in host memory. Collective over the ranks of the plan.
    """
    plan = images.plan
    # If no image is shown by two data ranks, each data rank exchanges features among its own ranks.
    group = groups.tp_dp_cp if plan.across else groups.tp_cp
    # All ranks take part in each round, because the exchange is collective; a rank with no image in
    # a round sends nothing. Rounds bound the memory of the tower: with images of 4,000 patches and
    # 10,000 patches at once, a rank encodes five images in three rounds.
    rounds = [
        [i for i, its_round in enumerate(plan.rounds) if its_round == number]
        for number in range(plan.num_rounds)
    ]
    mine = [[i for i in indices if plan.encoders[i] == group.rank()] for indices in rounds]
    features: dict[str, Tensor] = {}
    for number, indices in enumerate(rounds):
        loaded = images.load(mine[number], keep=False)
        for following in mine[number + 1 : number + 2]:
            # The next round's images are read while this round is encoded.
            images.prefetch(following)
        num_tokens = [count_tokens(plan.grids[i], tower) for i in indices]
        rows, order = exchange_shares(
            encode_share(tower, loaded),
            num_tokens,
            [plan.encoders[i] for i in indices],
            [plan.receivers(i) for i in indices],
            group,
        )
        device_bytes -= rows.nbytes
        if device_bytes < 0:
            rows = _to_host(rows)
        # `order` is by sender, so it differs from the order of the plan.
        pieces = rows.split([num_tokens[index] for index in order])
        features |= {plan.keys[indices[p]]: x for p, x in zip(order, pieces, strict=True)}
    return features


def _to_host(rows: Tensor) -> Tensor:
    """Copy to host memory, pinned where there is a GPU, without waiting."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=platform.has_gpu())
    return host.copy_(rows, non_blocking=True)

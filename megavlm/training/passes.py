"""Passes over a rank's packs through megatron-core's schedule: scoring without a graph, and forward
with backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megavlm.data.packing import Pack
from megavlm.data.processor import Picture
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.models.common.model import Features

# Of a pack's scores: the loss, already divided by its global denominator, and measures
# (`reduce_measures`).
LossFunction = Callable[[Pack, TokenScores], tuple[Tensor, dict[str, Tensor]]]


class VisionFeatures:
    """Features of the pictures of one step: encoded once if the tower is frozen, in each forward if
    it learns.
    """

    def __init__(self, model: DistributedDataParallel, pictures: Mapping[str, Picture]) -> None:
        self._model = model.module
        self._pictures = pictures
        self._learns = any(p.requires_grad for p in self._model.visual.parameters())
        self._encoded: Features = {}
        if not self._learns:
            with torch.no_grad():
                self._encoded = self._model.encode(list(pictures.values()))

    def of(self, pack: Pack) -> Features:
        if not self._learns:
            return self._encoded
        return self._model.encode([self._pictures[key] for key in dict.fromkeys(pack.pictures)])


def score(
    model: DistributedDataParallel,
    packs: Sequence[Pack],
    features: VisionFeatures,
    scoring: Scoring,
) -> list[TokenScores]:
    """Scores of each pack's targets, without a graph."""

    def collect(scores: TokenScores, non_loss_data: bool) -> TokenScores:
        assert non_loss_data
        return scores

    def forward_step(iterator: Iterator[Pack], _: Any) -> tuple[TokenScores, Any]:
        pack = next(iterator)
        return model(pack, features.of(pack), scoring), collect

    with torch.no_grad():
        return _run(model, packs, forward_step, forward_only=True, collect_non_loss_data=True)


def forward_backward(
    model: DistributedDataParallel,
    packs: Sequence[Pack],
    features: VisionFeatures,
    scoring: Scoring,
    loss_function: LossFunction,
) -> list[dict[str, Tensor]]:
    """Accumulates and reduces gradients of the packs' losses. Returns each pack's measures."""

    def loss_of(pack: Pack, scores: TokenScores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, sums = loss_function(pack, scores)
        num_tokens = torch.zeros(
            [], dtype=torch.int, device=loss.device
        )  # the loss is normalised already
        return loss, num_tokens, sums

    def forward_step(iterator: Iterator[Pack], _: Any) -> tuple[TokenScores, Any]:
        pack = next(iterator)
        return model(pack, features.of(pack), scoring), partial(loss_of, pack)

    return _run(model, packs, forward_step, forward_only=False)


def _run(
    model: DistributedDataParallel, packs: Sequence[Pack], forward_step: Any, **options: Any
) -> list[Any]:
    assert packs, "every rank needs a pack: the reductions are collective"
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(packs),
        model=model,
        num_microbatches=len(packs),
        seq_length=max(pack.token_ids.numel() for pack in packs),
        micro_batch_size=1,
        **options,
    )

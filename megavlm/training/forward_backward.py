"""Passes over a rank's packs with megatron-core's pipeline schedules: log-probs without an autograd
graph, and forward with backward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megavlm.data.packs.packing import Pack
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.training.step.vision_features import VisionFeatures

# Computes from a pack's scores the loss, already divided by its global denominator, and measures to
# be summed over ranks (`reduce_measures`).
Measures = dict[str, Tensor]
LossFunction = Callable[[Pack, TokenScores], tuple[Tensor, Measures]]
Chunks = Sequence[DistributedDataParallel]  # virtual stages of this pipeline rank, in order


def compute_logprobs(
    chunks: Chunks, packs: Sequence[Pack], features: VisionFeatures, scoring: Scoring
) -> list[TokenScores]:
    """Return the scores of each pack's targets, without an autograd graph and without entropies.
    Only the last pipeline stage has them; other stages return an empty list. Collective.
    """
    return _without_graph(chunks, packs, features, replace(scoring, entropy=False))


def logits(chunks: Chunks, packs: Sequence[Pack], features: VisionFeatures) -> list[Tensor]:
    """Return the logits [N, V] at each pack's targets, gathered over the vocabulary shards. Only
    the last pipeline stage has them; other stages return an empty list. For inspection and tests,
    not for training.
    """
    group = chunks[-1].module.language_model.pg_collection.tp
    whole = []
    for local in _without_graph(chunks, packs, features, None):
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        whole.append(torch.cat(parts, dim=-1))
    return whole


def _without_graph(
    chunks: Chunks, packs: Sequence[Pack], features: VisionFeatures, scoring: Scoring | None
) -> list[Any]:
    def collect(output: Any, non_loss_data: bool) -> Any:
        assert non_loss_data
        return output

    def forward_step(iterator: Iterator[Pack], model: Any) -> tuple[Any, Any]:
        return _forward(iterator, model, features, scoring)[1], collect

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        return _run(chunks, packs, forward_step, forward_only=True, collect_non_loss_data=True)


def forward_backward(
    chunks: Chunks,
    packs: Sequence[Pack],
    features: VisionFeatures,
    scoring: Scoring,
    loss_function: LossFunction,
) -> list[Measures]:
    """Accumulate and reduce the gradients of the packs' losses. Returns the measures of each pack
    on the last pipeline stage, an empty list on others. Collective.
    """

    def loss_of(pack: Pack, scores: TokenScores) -> tuple[Tensor, Tensor, Measures]:
        loss, sums = loss_function(pack, scores)
        num_tokens = torch.zeros(
            [], dtype=torch.int, device=loss.device
        )  # the loss is normalised already
        return loss, num_tokens, sums

    def forward_step(iterator: Iterator[Pack], model: Any) -> tuple[Any, Any]:
        pack, output = _forward(iterator, model, features, scoring)
        return output, partial(loss_of, pack)

    for chunk in chunks:
        chunk.train()
    return _run(chunks, packs, forward_step, forward_only=False)


def _forward(
    iterator: Iterator[Pack],
    model: DistributedDataParallel,
    features: VisionFeatures,
    scoring: Scoring | None,
) -> tuple[Pack, Any]:
    pack = next(iterator)
    encoded = features.of(pack) if model.module.pre_process else {}
    return pack, model(pack, encoded, scoring)


def _run(chunks: Chunks, packs: Sequence[Pack], forward_step: Any, **options: Any) -> list[Any]:
    assert packs, "every rank needs a pack: the reductions are collective"
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(packs) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(packs),
        seq_length=max(pack.token_ids.numel() for pack in packs),
        micro_batch_size=1,
        **options,
    )

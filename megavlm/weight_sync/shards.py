"""What this rank holds of the tensors that are sent, as it is now; checked against the plan."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.models.common.loading import local_tensors
from megavlm.models.common.lora import adapters
from megavlm.weight_sync.plan import TIED, Plan

Shard = Callable[[], Tensor]  # this rank's part of a Megatron tensor


def local_shards(
    plan: Plan, chunks: Sequence[MegatronModule], *, merged: bool = True
) -> dict[int, Shard]:
    """This rank's shards by entry. One with an adapter is given as the two merged, or without
    `merged` as it is without.

    Asserts that the plan is right: this rank holds what it shall give, and training changes here
    what it is said to change. A tensor is trained where its storage is that of a parameter that
    requires grad.
    """
    table = {(entry.megatron, entry.expert): index for index, entry in enumerate(plan.entries)}
    shards: dict[int, Shard] = {}
    changed = set()
    for chunk in chunks:
        trained = {p.data_ptr() for p in chunk.parameters() if p.requires_grad}
        adapted = {linear.base.weight.data_ptr(): linear for _, linear in adapters(chunk)}
        for held in local_tensors(chunk):
            index = table.get((held.key, held.expert))
            if index is None:
                continue  # an adapter's own, or a value head
            pointer = held.data.data_ptr()
            is_merged = merged and pointer in adapted
            shards[index] = adapted[pointer].merged_weight if is_merged else held.data.detach
            if pointer in trained or is_merged:
                changed.add(index)
    _check(plan, set(shards), changed)
    return shards


def _check(plan: Plan, held: set[int], changed: set[int]) -> None:
    rank = dist.get_rank()
    missing = plan.given_by(rank) - held
    assert not missing, f"rank {rank} has no {plan.entries[min(missing)].megatron}"
    stage = rank // plan.trainer.per_stage
    for index in held:
        key = plan.entries[index].megatron
        assert plan.stages[index] == stage or key == TIED, f"{key} is on rank {rank} too"
    wrong = (plan.changed & held) ^ changed
    assert not wrong, f"training and plan differ in {plan.entries[min(wrong)].megatron}"

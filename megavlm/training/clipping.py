"""Optimizer step in which the draft head's gradient is clipped by its own norm, and does not count
in the norm of the policy's.
"""

from collections.abc import Collection, Iterator
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor


class SeparateClipping:
    """Step of an optimizer of a model with a draft head.

    limit: Maximum norm of the head's gradient; 0 turns its clipping off. head: The head's
    parameters; none on a rank without it.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, head: Collection[Tensor], limit: float
    ) -> None:
        self._optimizer, self._limit = optimizer, limit
        self._head = {id(shard) for shard in _shards(optimizer, {id(x) for x in head})}
        for part in self._parts():
            for shard in part.get_parameters():
                if id(shard) in self._head:
                    # megatron-core's mark of what does not count in the norm of all gradients
                    shard.shared = True

    def step(self) -> tuple[float, float]:
        """Clip gradients and update the parameters. Returns the norms, before clipping, of the
        gradient without the head's, and of the head's. Collective.
        """
        optimizer = self._optimizer
        assert not optimizer.prepare_grads(), "finite gradients were refused"
        gradients = [
            _gradient(part, shard)
            for part in self._parts()
            for shard in part.get_parameters()
            if id(shard) in self._head
            and param_is_not_tensor_parallel_duplicate(shard, part.tp_group)
        ]
        norm = float(optimizer.get_grad_norm())
        of_head = get_grad_norm_fp32(
            gradients, grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group()
        )
        for part in self._parts():
            policy, head = list[Tensor](), list[Tensor]()
            for shard in part.get_parameters():
                (head if id(shard) in self._head else policy).append(shard)
            for shards, limit, of_these in (
                (policy, part.config.clip_grad, norm),
                (head, self._limit, of_head),
            ):
                if shards and limit:
                    clip_grad_by_total_norm_fp32(shards, limit, of_these, _is_decoupled(part))
        assert optimizer.step_with_ready_grads()
        return norm, of_head

    def _parts(self) -> list[Any]:
        return [part for part in self._optimizer.chained_optimizers if part.optimizer is not None]


def _shards(optimizer: MegatronOptimizer, parameters: Collection[int]) -> Iterator[Tensor]:
    """Yield this rank's shards of parameters, given by `id`."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for parameter, (group, place) in part.model_param_group_index_map.items():
            if id(parameter) in parameters:
                yield part.optimizer.param_groups[group]["params"][place]


def _is_decoupled(part: Any) -> bool:
    decoupled: bool = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return decoupled


def _gradient(part: Any, shard: Any) -> Tensor:
    gradient: Tensor = shard.decoupled_grad if _is_decoupled(part) else shard.grad
    return gradient

"""Training state in megatron-core's sharded form, with the same keys for every layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

# Optimizer state has the shapes of the model's tensors, so that any layout can load it, and each
# layer has its own keys.
FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
}


class TrainedState(Protocol):
    """Model chunks, optimizer and scheduler of this rank, such as training's Updater."""

    @property
    def chunks(self) -> Sequence[MegatronModule]: ...
    @property
    def optimizer(self) -> MegatronOptimizer: ...
    @property
    def scheduler(self) -> OptimizerParamScheduler: ...


def sharded_state(
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the sharded state dict of the model, and of optimizer and scheduler if given."""
    metadata = {**FORM, "dp_cp_group": replica_group()}
    # Chunks of a pipeline stage have the same local names, but different keys.
    state: dict[str, Any] = {
        "model": {
            str(index): _tensors(unwrap_model(chunk).sharded_state_dict(metadata=metadata))
            for index, chunk in enumerate(chunks)
        }
    }
    if optimizer is not None:
        with _offsets_without_padding(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(
                state["model"], is_loading=is_loading, metadata=metadata
            )
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


@contextmanager
def _offsets_without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Correct the places of parameters in the optimizer's joined buckets.

    megatron-core 0.16.1 joins buckets without the padding between them, but reads each parameter at
    its place with padding: parameters after the first padded bucket would be saved shifted.
    """
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    buffers = [buffer for part in parts for buffer in part.buffers]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer, places in zip(buffers, padded, strict=True):
        sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
        starts = [*accumulate(sizes, initial=0)]
        shifts = [
            start - bucket.offset for start, bucket in zip(starts, buffer.buckets, strict=False)
        ]
        buffer.param_index_map = {
            parameter: (first + shifts[bucket], end + shifts[bucket], bucket)
            for parameter, (first, end, bucket) in places.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def replica_group() -> Any:
    """Return the process group of the ranks that hold the same shards of the model."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def current_layout() -> dict[str, int]:
    """Return the number of ranks on each axis in this run."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual": virtual or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _tensors(state: ShardedStateDict) -> ShardedStateDict:
    """Drop Transformer Engine's fp8 states: HF has none, and CPU models could not load them."""
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}

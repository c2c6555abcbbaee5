"""Mesh of ranks: the number of ranks on each axis, and megatron-core's process groups."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megavlm.config.parallel import Parallel, check_world
from megavlm.parallel import platform

ShardAxis = Literal["tensor", "expert_tensor"]

# Time that a rank waits for others in a collective. Rank 0 generates rollouts and evaluates
# meanwhile; run.watchdog ends a run that hangs much sooner.
TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Number of ranks on each axis. The size of the data axis follows from the world size.

    virtual: Number of chunks of layers per pipeline stage.
    expert, expert_tensor: Another division of a pipeline stage's ranks, used only for the experts
        of a mixture-of-experts model.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model and share one microbatch."""
        return self.tensor * self.context * self.pipeline

    @classmethod
    def from_config(cls, parallel: Parallel) -> "Layout":
        """Return a recipe's layout. Raises ValueError if gloo's collectives do not support it."""
        cut, together = parallel.expert_tensor, parallel.tensor * parallel.context
        if cut > 1 and together % cut and not platform.has_gpu():
            raise ValueError(
                f"parallel.expert_tensor={cut} shards experts over data ranks with "
                "different numbers of tokens; gloo needs equal numbers: on a CPU set it to 1 or to "
                f"a divisor of parallel.tensor x parallel.context = {together}"
            )
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual=parallel.virtual,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=cut,
        )


@dataclass(frozen=True)
class Mesh:
    """Coordinates and process groups of this rank."""

    layout: Layout
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    expert_rank: int
    expert_tensor_rank: int
    data_size: int
    data_rank: int
    data_ranks: tuple[int, ...]  # data rank of every rank in the world
    pipeline_ranks: tuple[int, ...]  # pipeline rank of every rank in the world
    groups: ProcessGroupCollection
    objects: dist.ProcessGroup  # gloo group of all ranks, for Python objects

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    @property
    def ranks_per_node(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.layout.pipeline - 1

    @property
    def tensor_size(self) -> int:
        return self.layout.tensor

    def place(self, axis: ShardAxis) -> tuple[int, int]:
        """Return this rank's coordinate on an axis that shards tensors, and the axis's size."""
        if axis == "tensor":
            return self.tensor_rank, self.layout.tensor
        return self.expert_tensor_rank, self.layout.expert_tensor


def init_distributed() -> None:
    """Join the ranks that torchrun started. A program started without it is a single rank."""
    platform.start(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend(), timeout=TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(
            platform.backend(), store=store, rank=0, world_size=1, timeout=TIMEOUT
        )


def own_store() -> dist.Store:
    """Return a new connection to the ranks' store, for the use of one thread."""
    store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def build_mesh(layout: Layout | None = None, *, seed: int = 0) -> Mesh:
    """Build megatron-core's groups for a layout. A second call replaces them. Collective."""
    layout = layout or Layout()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    check_world(layout, world_size)
    real = dist.get_backend() != "fake"  # see parallel/fake.py
    if dist.get_backend() == "gloo" and layout.expert > 1 and layout.expert_tensor > 1:
        raise ValueError(
            f"parallel.expert={layout.expert} with parallel.expert_tensor={layout.expert_tensor} "
            "gathers unequal numbers of tokens, but gloo cannot: on a CPU set one of them to 1."
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=TIMEOUT / timedelta(minutes=1),
        # the optimizer's checkpoint form gathers over gloo groups, also on machines with GPUs
        create_gloo_process_groups=real,
    )
    model_parallel_cuda_manual_seed(seed)
    group = dist.new_group(backend="gloo" if real else None, timeout=TIMEOUT)
    assert group is not None, "a group over all ranks has every rank in it"
    # megatron-core's order of axes, fastest first: tensor, context, data, pipeline
    data_size = world_size // layout.model_size
    per_copy = layout.tensor * layout.context
    return Mesh(
        layout=layout,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        data_size=data_size,
        data_rank=rank // per_copy % data_size,
        data_ranks=tuple(other // per_copy % data_size for other in range(world_size)),
        pipeline_ranks=tuple(other // (per_copy * data_size) for other in range(world_size)),
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        objects=group,
    )


def shutdown() -> None:
    """Destroy the process groups after a barrier. Without it gloo ranks may abort at exit.
    Collective.
    """
    if dist.is_initialized():
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

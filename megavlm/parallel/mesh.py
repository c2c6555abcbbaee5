"""The mesh of ranks: how many per axis, and the process groups that megatron-core builds."""

import datetime
import os
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megavlm.parallel import platform


@dataclass(frozen=True)
class Mesh:
    """This rank's place and its groups. `objects` is a gloo group over all ranks, for Python
    objects.
    """

    tensor_size: int
    tensor_rank: int
    data_size: int
    data_rank: int
    data_ranks: tuple[int, ...]  # of every rank in the world
    groups: ProcessGroupCollection
    objects: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0


def init_distributed(timeout_minutes: float = 30.0) -> None:
    """Joins the ranks that torchrun started; a program started without it is one rank."""
    platform.start(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend(), timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # there, but not re-exported
        dist.init_process_group(
            platform.backend(), store=store, rank=0, world_size=1, timeout=timeout
        )


def build_mesh(*, tensor: int = 1, seed: int = 0) -> Mesh:
    """megatron-core's groups for a layout; what the world size leaves over is the data axis."""
    world_size = dist.get_world_size()
    if world_size % tensor:
        raise ValueError(
            f"parallel.tensor={tensor} does not divide the world size {world_size}: "
            f"start a multiple of {tensor} ranks."
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # gloo groups: the optimizer's checkpoint form gathers over them, on GPU machines too
    parallel_state.initialize_model_parallel(tensor, create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(seed)
    objects = dist.new_group(backend="gloo")
    data_rank = parallel_state.get_data_parallel_rank()
    data_ranks: list[int] = [0] * world_size
    dist.all_gather_object(data_ranks, data_rank, group=objects)
    return Mesh(
        tensor_size=tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        data_rank=data_rank,
        data_ranks=tuple(data_ranks),
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        objects=objects,
    )


def shutdown() -> None:
    """Every rank ends with a barrier: without it gloo ranks abort at exit now and then."""
    if dist.is_initialized():
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

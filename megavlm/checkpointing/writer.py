"""Writes whole tensors as a step, in one process, without a model, one tensor at a time."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device; makes each when its turn to be written comes.

    megatron-core's own writer wants all of them in memory first.
    """

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._make = make

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._make(index.fqn)


def write_tensors(
    folder: Path, shapes: Mapping[str, Tensor], make: Callable[[str], Tensor]
) -> None:
    """Writes the form that megatron-core's `dist_checkpointing.load` reads.

    `shapes`: key -> tensor on the meta device; `make(key)`: the tensor itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(shapes),
            storage_writer=dcp.FileSystemWriter(folder, sync_files=False),
            planner=_LazyPlanner(make),
            no_dist=True,
        )
    torch.save({}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))

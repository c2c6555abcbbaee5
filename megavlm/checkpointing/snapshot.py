"""This rank's share of a training state: planned with the other ranks, then written without them.

megatron-core plans a save; its own writers are not used. They are forked processes: a fork while
CUDA is initialised and NCCL's threads live is undefined, and its persistent writer is a second
process that imports everything and outlives a kill. Here threads write: they copy what training
may change before training goes on, and torch and zlib let go of the interpreter while they work.
"""

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpointing.checksums import SummedFile, Sums
from megavlm.checkpointing.state import FORM, replica_group, sharded_state
from megavlm.checkpointing.writer import save_tensor

# A file's path, its name, and what goes into it: (item of the plan, bytes), (item, tensor).
Bucket = tuple[str, str, tuple[list[tuple[Any, BytesIO]], list[tuple[Any, torch.Tensor]]]]


@dataclass(frozen=True)
class Written:
    """What one rank wrote: where each piece lies, and the sums of its files."""

    pieces: list[WriteResult]
    files: dict[str, Sums]


class Snapshot:
    """In host memory until it is written: this rank's own shards, once."""

    def __init__(
        self,
        path: Path,
        chunks: Sequence[MegatronModule],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        *,
        copy: bool,
    ) -> None:
        """Collective over all ranks; nothing is written yet, so that no rank can fail alone.

        `copy`: of tensors that are on the host already; without it training must wait.
        """
        plan = _Plan("torch_dist", 1)
        # Never used. megatron-core's is a process of its own, started by importing everything anew.
        filesystem_async._results_queue = queue.Queue()
        state = sharded_state(chunks, optimizer, scheduler, is_loading=False)
        tensors, common = save_preprocess({**state, "content_metadata": dict(FORM)})
        del state
        FullyParallelSaveStrategyWrapper(plan, replica_group()).async_save(tensors, path)
        del tensors
        self._path, self._plan, self._common = path, plan, BytesIO()
        torch.save(common, self._common)
        self._buckets: list[Bucket] = plan.writer.write_buckets
        for _, _, (_, shards) in self._buckets:
            for index, (item, shard) in enumerate(shards):  # one at a time: the source may go
                shards[index] = (item, shard.to("cpu", copy=copy))

    def write_common(self) -> None:
        """What all ranks share; on rank 0."""
        (self._path / COMMON_STATE_FNAME).write_bytes(self._common.getbuffer())

    def write(self) -> Written:
        """Writes this rank's files. Touches nothing but the copy, so any thread may do it."""
        buckets, self._buckets = self._buckets, []
        with ThreadPoolExecutor(max(1, len(buckets)), "checkpoint-file") as pool:
            parts = list(pool.map(_write_bucket, buckets))
        files = {name: part.files[name] for part in parts for name in part.files}
        return Written([piece for part in parts for piece in part.pieces], files)

    def write_contents(self, pieces: Iterable[list[WriteResult]]) -> list[str]:
        """The table of contents, on rank 0, of every rank's pieces; the names of its files."""
        self._plan.writer.finish(self._plan.contents, list(pieces))
        save_config(CheckpointingConfig("torch_dist", 1), str(self._path))
        return [".metadata", "metadata.json"]


class _Plan(TorchDistSaveShardedStrategy):
    """megatron-core's plan of a save, without its writing."""

    writer: filesystem_async.FileSystemWriterAsync
    contents: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        self.writer, self.contents = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


def _write_bucket(bucket: Bucket) -> Written:
    path, name, (blobs, tensors) = bucket
    pieces = []
    with SummedFile(Path(path)) as file:
        items: list[tuple[Any, BytesIO | torch.Tensor]] = [*blobs, *tensors]
        for item, data in items:
            start = file.sums["bytes"]
            if isinstance(data, BytesIO):
                file.write(data.getbuffer())
            else:
                save_tensor(data, file)
            length = file.sums["bytes"] - start
            pieces.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
    return Written(pieces, {name: file.sums})

"""Snapshot of one rank's training state: planned together with the other ranks, and written by each
rank.

megatron-core plans a save, but its writers are not used. They are forked processes, and a fork is
undefined while CUDA is initialised and NCCL's threads run; the persistent writer is a second
process that imports everything and survives a kill of its rank. Here threads write: the tensors
that training may change are copied before training continues, and torch and zlib release the
interpreter lock while they work.
"""

import queue
from collections.abc import Iterable
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpointing.checksums import SummedFile, Sums
from megavlm.checkpointing.reader import CONTENTS
from megavlm.checkpointing.state import FORM, TrainedState, replica_group, sharded_state
from megavlm.checkpointing.writer import save_tensor

# Path and name of a file, and its contents: pairs (item of the plan, bytes) and (item, tensor).
WriteBucket = tuple[str, str, tuple[list[tuple[Any, BytesIO]], list[tuple[Any, torch.Tensor]]]]


@dataclass(frozen=True)
class Written:
    """Pieces that one rank wrote, with their places, and the checksums of the rank's files."""

    pieces: list[WriteResult]
    files: dict[str, Sums]


class Snapshot:
    """One copy of this rank's own shards in host memory. It is freed when it is written."""

    def __init__(
        self,
        path: Path,
        state: TrainedState,
        *,
        copy: bool,
    ) -> None:
        """Plan the save and copy the shards to the host. Collective.

        copy: Also copy tensors that are already in host memory. Otherwise training must wait until
            the snapshot is written.

        Nothing is written here, so that no rank fails while others go on.
        """
        plan = _Plan("torch_dist", 1)
        # This queue is never used. megatron-core would create one whose process imports everything.
        filesystem_async._results_queue = queue.Queue()
        sharded = sharded_state(state.chunks, state.optimizer, state.scheduler, is_loading=False)
        tensors, common = save_preprocess({**sharded, "content_metadata": dict(FORM)})
        del sharded
        FullyParallelSaveStrategyWrapper(plan, replica_group()).async_save(tensors, path)
        del tensors
        self._path, self._plan, self._common = path, plan, BytesIO()
        torch.save(common, self._common)
        self._buckets: list[WriteBucket] = plan.writer.write_buckets
        for _, _, (_, shards) in self._buckets:
            for index, (item, shard) in enumerate(shards):  # one by one, so each source is freed
                shards[index] = (item, shard.to("cpu", copy=copy))

    def write_common(self) -> str:
        """Write the state that all ranks share, on rank 0. Returns the name of its file."""
        (self._path / COMMON_STATE_FNAME).write_bytes(self._common.getbuffer())
        return str(COMMON_STATE_FNAME)

    def write(self) -> Written:
        """Write this rank's files. Reads only the copy, so that any thread may call it."""
        buckets, self._buckets = self._buckets, []
        with ThreadPoolExecutor(max(1, len(buckets)), "checkpoint-file") as pool:
            parts = list(pool.map(_write_bucket, buckets))
        files = {name: part.files[name] for part in parts for name in part.files}
        return Written([piece for part in parts for piece in part.pieces], files)

    def write_contents(self, pieces: Iterable[list[WriteResult]]) -> list[str]:
        """Write the table of contents of all ranks' pieces, on rank 0. Returns the names of its
        files.
        """
        self._plan.writer.finish(self._plan.contents, list(pieces))
        save_config(CheckpointingConfig("torch_dist", 1), str(self._path))
        return [CONTENTS, "metadata.json"]


class _Plan(TorchDistSaveShardedStrategy):
    """megatron-core's save strategy, reduced to planning: it does not write."""

    writer: filesystem_async.FileSystemWriterAsync
    contents: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        self.writer, self.contents = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


def _write_bucket(bucket: WriteBucket) -> Written:
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

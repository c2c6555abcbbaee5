"""Saves a training step: all ranks write, rank 0 makes it appear."""

import json
import queue
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megavlm.checkpointing import atomic, random_states
from megavlm.checkpointing import folder as form
from megavlm.checkpointing.checksums import checksums
from megavlm.checkpointing.state import FORM, layout, replica_group, sharded_state
from megavlm.checkpointing.together import CheckpointError, together


def save(
    folder: str | Path,
    step: int,
    *,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    extra: dict[str, Any],
    hf_folder: str | Path | None = None,
) -> None:
    """Writes everything that training needs to go on from `step`. Collective over all ranks.

    `chunks`: this rank's part of the model. `extra`: the trainer's own state, JSON-able, as rank 0
    has it. `hf_folder`: the model folder whose configuration, tokenizer and processor files an
    export needs. CheckpointError, on every rank, where a rank cannot write; nothing partial is left
    then, and older steps stay.
    """
    folder = Path(folder)
    path = atomic.partial(form.step_folder(folder, step))
    rank = dist.get_rank()
    what = f"checkpoint of step {step} in {folder}"

    def prepare() -> None:
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        if hf_folder is not None and not (folder / form.HF).exists():
            form.copy_hf_files(Path(hf_folder), atomic.partial(folder / form.HF))
            atomic.replace_folder(folder / form.HF)
        path.mkdir()

    def write() -> dict[str, dict[str, int]]:
        state = sharded_state(chunks, optimizer, scheduler, is_loading=False)
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), replica_group()
        )
        # The writers' results come back within this process. megatron-core's own queue is another
        # process, started by importing everything again, and left behind when this one is killed.
        filesystem_async._results_queue = queue.Queue()
        dist_checkpointing.save(state, str(path), strategy, content_metadata=dict(FORM))
        random_states.write(random_states.path(path, rank))
        if rank == 0:
            (path / "extra.json").write_text(json.dumps(extra))
        return checksums(path, _written_by(path, rank))

    def publish(files: dict[str, dict[str, int]]) -> None:
        if rank == 0:
            form.Manifest(step=step, has_optimizer=True, layout=layout(), files=files).write(path)
            form.publish(folder, step)

    try:
        together(what, prepare)
        files = {name: sums for part in together(what, write) for name, sums in part.items()}
        together(what, lambda: publish(files))
    except CheckpointError as error:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        free = shutil.disk_usage(folder).free / 1e9
        raise CheckpointError(
            f"{error}. Older steps are intact; {free:.1f} GB are free there."
        ) from error


def _written_by(path: Path, rank: int) -> list[str]:
    """Each file once: a rank's own shards and random states; rank 0 has the common ones too."""
    own = {file.name for file in path.glob(f"__{rank}_*")} | {random_states.path(path, rank).name}
    if rank == 0:
        shared = {file.name for file in path.iterdir()}
        own |= {name for name in shared if not name.startswith(("__", "random_"))}
    return sorted(own)


def _clean(folder: Path) -> None:
    """Removes what a killed run left half-written."""
    for pattern in (".step_*.partial", ".step_*.older", f".{form.HF}.partial"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)

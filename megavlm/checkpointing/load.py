"""Loads a step into a model of any layout: all of it, or the weights alone."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megavlm.checkpointing import folder as form
from megavlm.checkpointing import random_states
from megavlm.checkpointing.adapters import adapter_keys
from megavlm.checkpointing.checksums import first_difference
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.state import layout, replica_group, sharded_state
from megavlm.checkpointing.together import together

logger = logging.getLogger(__name__)


def load(
    folder: str | Path,
    *,
    step: int | None = None,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
) -> dict[str, Any]:
    """Loads a step (default: the latest) in place; returns its `extra`. Collective over all ranks.

    Without an optimizer only the weights are loaded, in the model's dtype; then any checkpoint will
    do, an imported one too. With it this rank's random states come back as well, if the run has the
    layout that saved them. An optimizer that was built before its model's weights were loaded alone
    needs `optimizer.reload_model_params()`.

    ValueError, the same on every rank, where there is no such step, a file of it or of the model's
    is missing or damaged, a tensor is missing or of another shape, or the step's adapters would be
    left behind.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def find() -> tuple[Path, form.Manifest] | None:
        """One rank looks, and one warns."""
        if rank != 0:
            return None
        path = form.locate(Path(folder), step)
        return path, form.Manifest.read(path)

    (found, *_) = together("load", find)
    assert found is not None
    path, manifest = found
    if optimizer is not None and not manifest.has_optimizer:
        raise ValueError(f"{path} holds weights alone, without the optimizer's state.")

    def verify() -> None:
        """Each rank reads its share of the files."""
        names = sorted(manifest.files)[rank::world_size]
        if problem := first_difference(path, manifest.files, names):
            raise ValueError(problem)
        if rank == 0:
            form.check_hf_files(path.parent)

    def compare() -> tuple[set[str], set[str]]:
        """The keys that this rank's part of the model asks for; those of the step's adapters."""
        model = sharded_state(chunks, None, None, is_loading=True)["model"]
        tensors = [value for part in model.values() for value in part.values()]
        reader = StepReader(path)
        _check_tensors(tensors, reader, path, trains=optimizer is not None)
        asked = {part.key for value in tensors for part in _parts(value)}
        return asked, adapter_keys(reader.tensors)

    together("load", verify)  # all of it, before a rank reads what another one finds damaged
    asked, held = zip(*together("load", compare), strict=True)
    if left := held[0] - set().union(*asked):
        raise ValueError(
            f"{path} holds adapters that this model has no place for ({min(left)}): merge them "
            "(megavlm-convert lora-merge), or set lora as the run that saved them did."
        )
    state = dist_checkpointing.load(
        sharded_state(chunks, optimizer, scheduler, is_loading=True),
        str(path),
        FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(path)), replica_group()
        ),
    )
    for index, chunk in enumerate(chunks):
        part = state["model"][str(index)]
        missing, unexpected = unwrap_model(chunk).load_state_dict(part, strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing), missing
    if scheduler is not None:
        scheduler.num_steps = 0  # megatron-core adds the saved count to what is there
        scheduler.load_state_dict(state["scheduler"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        if manifest.layout == layout():
            random_states.restore(random_states.path(path, rank))
        elif rank == 0:
            logger.warning(
                "%s was saved by another layout (%s): random states start from the seed.",
                path,
                manifest.layout,
            )
    extra = path / "extra.json"
    return json.loads(extra.read_text()) if extra.is_file() else {}


def _check_tensors(tensors: Sequence[Any], reader: StepReader, path: Path, *, trains: bool) -> None:
    """The step holds the model's tensors, in the model's global shapes; `trains`: and the
    optimizer's state of those that are trained.
    """
    for value in tensors:
        for part in _parts(value):
            if part.key not in reader.tensors:
                raise ValueError(f"{path} has no tensor {part.key}, which the model asks for.")
            if reader.shape(part.key) != tuple(part.global_shape):
                raise ValueError(
                    f"{part.key} in {path} has shape {reader.shape(part.key)}; "
                    f"the model's has {tuple(part.global_shape)}."
                )
            if trains and value.data.requires_grad and _moment(part.key) not in reader.tensors:
                raise ValueError(
                    f"{path} has no optimizer state of {part.key}, which the run that saved it did "
                    "not train: train what it trained, or start another run from its weights "
                    "(model.checkpoint)."
                )


def _parts(value: Any) -> list[ShardedTensor]:
    parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
    assert all(isinstance(part, ShardedTensor) for part in parts), parts
    return parts


def _moment(key: str) -> str:
    """A tensor of the optimizer's state, as megatron-core names it."""
    return f"optimizer.state.exp_avg.{key}"

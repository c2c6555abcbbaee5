"""Loads a step into a model of any layout: the whole training state, or only the weights."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megavlm.checkpointing.adapter_settings import adapter_keys
from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.checkpointing.checksums import first_difference
from megavlm.checkpointing.folder import (
    Manifest,
    check_family,
    check_hf_files,
    locate_step,
    read_extra,
)
from megavlm.checkpointing.random_states import random_states_file, restore_random_states
from megavlm.checkpointing.reader import StepReader, read_values
from megavlm.checkpointing.state import current_layout, replica_group, sharded_state

HEAD = "language_model.output_layer.weight"

logger = logging.getLogger(__name__)


def load_checkpoint(
    folder: str | Path,
    *,
    step: int | None = None,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    model_type: str | None = None,
) -> dict[str, Any]:
    """Load a step in place and return its `extra`, the saved state of the trainer, with the
    path of a file in place of bytes. Collective.

    step: None loads the latest step.
    optimizer: None loads only the weights, in the model's dtype, and also accepts an imported
        checkpoint. Otherwise this rank's random states are restored as well, if
        the layout is the one that saved them.
    model_type: Model family that the step must have, None for any.

    If only the weights are loaded into a model that already has an optimizer, call
    `optimizer.reload_model_params()` afterwards.

    Raises ValueError, the same on every rank, if the step does not exist, if it has another family,
    if a file of the step or of the model is missing or damaged, if a tensor is missing or has
    another shape, or if the model has no place for the step's adapters.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def find() -> tuple[Path, Manifest] | None:
        """Locate the step on rank 0, so that warnings appear once."""
        if rank != 0:
            return None
        path = locate_step(Path(folder), step)
        if model_type is not None:
            check_family(path, model_type)
        return path, Manifest.read(path)

    (found, *_) = run_on_all_ranks("load", find)
    assert found is not None
    path, manifest = found
    if optimizer is not None and not manifest.has_optimizer:
        raise ValueError(f"{path} holds weights only, without optimizer state.")

    def verify() -> None:
        """Check this rank's share of the files."""
        names = sorted(manifest.files)[rank::world_size]
        if problem := first_difference(path, manifest.files, names):
            raise ValueError(problem)
        if rank == 0:
            check_hf_files(path.parent)

    random_states: list[Any] = []  # those that this rank saved, if the layout is the same

    def compare() -> tuple[set[str], set[str]]:
        """Compare this rank's part of the model with the step. Returns the keys that the part
        reads, and the keys of the step's adapters.
        """
        model = sharded_state(chunks, None, None, is_loading=True)["model"]
        tensors = [value for part in model.values() for value in part.values()]
        reader = StepReader(path)
        _check_tensors(tensors, reader, path, trains=optimizer is not None)
        is_tied = any(
            unwrap_model(chunk).language_model.share_embeddings_and_output_weights
            for chunk in chunks
        )
        if is_tied and HEAD in reader.tensors:
            raise ValueError(
                f"{path} has an output layer of its own, but config.json in model.folder ties it "
                "to the embedding: set tie_word_embeddings to false there, in text_config too"
            )
        wanted = {part.key for value in tensors for part in _parts(value)}
        # megatron-core reads this file below; reading it here turns damage into a ValueError.
        read_values(path / COMMON_STATE_FNAME)
        if optimizer is not None and manifest.layout == current_layout():
            random_states.append(read_values(random_states_file(path, rank)))
        return wanted, adapter_keys(reader.tensors)

    # All files are verified first, so that no rank reads a file that another rank finds damaged.
    run_on_all_ranks("load", verify)
    wanted, held = zip(*run_on_all_ranks("load", compare), strict=True)
    if left := held[0] - set().union(*wanted):
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
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])
        for states in random_states:
            restore_random_states(states)
        if not random_states and rank == 0:
            logger.warning(
                "%s was saved under another layout (%s): random states start from the seed.",
                path,
                manifest.layout,
            )
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])  # this sets learning rates in the optimizer
    return read_extra(path)


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state, but not its settings: the recipe may have changed them."""
    kept = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in sorted(state)]
    for part, saved in zip(parts, states, strict=True):
        if part.optimizer is not None:  # it has parameters
            # megatron-core matches groups by their settings, which the recipe may have changed. The
            # count of steps is the same in all groups.
            inner, groups = saved["optimizer"], part.optimizer.param_groups
            steps = [{"step": g["step"]} for g in inner["param_groups"] if "step" in g]
            counted = steps[0] if steps else {}
            inner["param_groups"] = [
                {name: value for name, value in group.items() if name != "params"} | counted
                for group in groups
            ]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)


def _check_tensors(tensors: Sequence[Any], reader: StepReader, path: Path, *, trains: bool) -> None:
    """Check that the step holds the model's tensors in their global shapes, and with `trains` the
    optimizer state of the trained tensors. Raises ValueError if not.
    """
    for value in tensors:
        for part in _parts(value):
            reader.check(part.key, tuple(part.global_shape))
            if trains and value.data.requires_grad and _moment(part.key) not in reader.tensors:
                raise ValueError(
                    f"{path} has no optimizer state of {part.key}, because the run that saved it "
                    "did not train it: train the same parameters, or start another run from its "
                    "weights (model.checkpoint)."
                )


def _parts(value: Any) -> list[ShardedTensor]:
    parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
    assert all(isinstance(part, ShardedTensor) for part in parts), parts
    return parts


def _moment(key: str) -> str:
    """Return the key of a tensor's first moment in megatron-core's optimizer state."""
    return f"optimizer.state.exp_avg.{key}"

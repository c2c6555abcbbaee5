"""megatron-core's gradient buffers for a model's chunks. Gradients are reduced after an update's
last backward or while it runs; updated parameters can be gathered while the next forward runs.

NCCL needs the same order of collectives on all ranks. A rank whose pack has no images does not run
the vision tower, so the tower must not trigger a collective: its gradients are reduced after the
backward, and all gathers start together after the update, in the order of the forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor, nn

from megavlm.config.optimizer import Optimizer
from megavlm.models.common.model import VisionLanguageModel


def wrap(
    chunks: Sequence[VisionLanguageModel],
    settings: Optimizer | None = None,
    *,
    shard_optimizer: bool = True,
) -> list[DistributedDataParallel]:
    """Give each chunk contiguous gradient buffers, in fp32 by default, reduced over the data and
    context axes after the last microbatch. settings: Optimizer settings; None takes the defaults.

    shard_optimizer: If true, each data rank gets only its shard of the reduced gradient; otherwise
    all of it.
    """
    options = (settings or Optimizer()).megatron_options
    ddp_config = DistributedDataParallelConfig(
        **{key: options[key] for key in options if hasattr(DistributedDataParallelConfig, key)},
        use_distributed_optimizer=shard_optimizer,
        align_param_gather=True,  # a layer's forward only waits for its own gather
    )
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_gradients
    wrapped = [
        # Gradients of later chunks are ready while other chunks compute, so they need no smaller
        # buckets. Without bucketing all parameters are gathered as one; gloo gets this wrong if
        # they have two dtypes.
        DistributedDataParallel(
            config, ddp_config, chunk, disable_bucketing=index > 0 and len(_dtypes(chunk)) < 2
        )
        for index, chunk in enumerate(chunks)
    ]
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        for chunk in wrapped:
            _reduce_tower_last(chunk)
    if ddp_config.overlap_param_gather:
        for chunk in wrapped:
            _wait_for_output_weight(chunk)
            for group in _groups(chunk):
                group.param_gather_dispatched = True  # parameters are whole until an update
    return wrapped


def _dtypes(chunk: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in chunk.parameters() if parameter.requires_grad}


def _groups(chunk: DistributedDataParallel) -> list[Any]:
    """Return the bucket groups, each reduced and gathered by one collective. Later layers come
    first.
    """
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _reduce_tower_last(chunk: DistributedDataParallel) -> None:
    """Exclude bucket groups with tower gradients from the reduction during the backward. A group
    that never counts a ready gradient is reduced after the backward.
    """
    tower = chunk.module.visual
    trained = set() if tower is None else {p for p in tower.parameters() if p.requires_grad}
    for group in _groups(chunk):
        if not trained.isdisjoint(group.params):
            group.register_grad_ready = lambda *args: None


def _wait_for_output_weight(chunk: DistributedDataParallel) -> None:
    """Wait for the gathered output layer before the final norm. Its weight is used directly and not
    by the layer's own forward, so no hook of that forward would wait.
    """
    model = chunk.module.language_model
    output = getattr(model, "output_layer", None)
    group = None if output is None else chunk.param_to_bucket_group.get(output.weight)
    if group is not None:

        def wait(module: nn.Module, inputs: Any) -> None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

        model.decoder.final_layernorm.register_forward_pre_hook(wait)


def begin_gather(chunk: DistributedDataParallel) -> None:
    """Start to gather updated parameters, the first layers first. Does nothing if the optimizer's
    step gathers them already (overlap_param_gather=false). Collective.
    """
    if chunk.ddp_config.overlap_param_gather:
        for group in reversed(_groups(chunk)):
            group.start_param_sync()


def finish_gather(chunk: DistributedDataParallel) -> None:
    """Block until all gathers in flight are complete."""
    for group in _groups(chunk):
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)  # waits


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **_: Any
) -> None:
    """Sum gradients over the data and context axes, and the tower's over the tensor axis.

    megatron's token count is not used, because losses are already divided by their global number of
    tokens.
    """
    finalize_model_grads(chunks, None)
    sum_tower_gradients(chunks[0].module)


@contextmanager
def without_reduction(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Leave the gradients of backward passes within the context unreduced, to be reduced once by
    `reduce_gradients`.
    """
    config = chunks[0].config
    functions = config.finalize_model_grads_func, config.no_sync_func
    # A pipeline schedule would leave no_sync before its last microbatch.
    config.finalize_model_grads_func = config.no_sync_func = None
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        yield
    config.finalize_model_grads_func, config.no_sync_func = functions


def reduce_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Reduce gradients that were accumulated `without_reduction`. Collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
    finalize_gradients(list(chunks))


def sum_tower_gradients(model: VisionLanguageModel) -> None:
    """Sum the tower's gradients over the tensor axis, because each tensor rank encoded only a share
    of the images.
    """
    if model.visual is None:
        return
    group = model.language_model.pg_collection.tp
    trained = [p for p in model.visual.parameters() if p.requires_grad]
    gradients: list[Tensor] = [getattr(p, "main_grad") for p in trained]  # noqa: B009
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))

"""Updates of a model: gradient buffers, distributed optimizer and learning-rate schedule, all of
them megatron-core's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megavlm.config.optimizer import Optimizer
from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.collectives import any_rank, reduce_measures
from megavlm.parallel.mesh import Mesh
from megavlm.training.forward_backward import LossFunction, VisionFeatures, forward_backward
from megavlm.training.guards import SkipCounter


@dataclass(frozen=True)
class Updater:
    """Updates a model: this rank's chunks with their gradient buffers, the optimizer and the
    schedule.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    start: int  # the schedule's count before the first update
    mesh: Mesh
    skips: SkipCounter = field(default_factory=SkipCounter)

    def update(
        self,
        packs: Sequence[Pack],
        features: VisionFeatures,
        loss_function: LossFunction,
        *,
        step: int,
        scoring: Scoring | None = None,
        value_head_alone: bool = False,
    ) -> dict[str, float]:
        """Accumulate gradients over `packs` and make one optimizer step, or none. Returns measures
        summed over all ranks. Collective.

        There is no optimizer step where a gradient is not finite (`skipped_updates`; RuntimeError
        after too many in a row, which names `step`), or where the loss reports `signal` and no
        token has any (`updates_without_signal`): Adam divides by the gradient's size, and would
        make a full step of rounding errors, or of earlier gradients in its moments. The schedule
        does not advance then.

        value_head_alone: update the value head only.
        """
        self.zero_gradients()
        reports = forward_backward(
            self.chunks, packs, features, scoring or Scoring(), loss_function
        )
        measures = reduce_measures(reports, self.mesh)
        skipped = not self.gradients_are_finite()
        self.skips.record(skipped, step)
        without_signal = not skipped and measures.get("signal", 1.0) == 0
        measures["skipped_updates"] = float(skipped)
        measures["updates_without_signal"] = float(without_signal)
        measures["learning_rate"] = self.learning_rate
        if skipped or without_signal:
            return measures | {"gradient_norm": float("nan") if skipped else 0.0}
        return measures | {"gradient_norm": self.step(value_head_alone=value_head_alone)}

    @property
    def has_moved(self) -> bool:
        """True after an update since the run's start, before a resume or after it."""
        return self.scheduler.num_steps > self.start

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients_are_finite(self) -> bool:
        """Return True if gradients are finite on every rank. Collective."""
        buffers = [
            buffer
            for chunk in self.chunks
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        # The largest magnitude is NaN or infinite if any element is; it needs no copy of a buffer.
        largest = [torch.linalg.vector_norm(buffer.grad_data, ord=torch.inf) for buffer in buffers]
        return not any_rank(any(not norm.isfinite() for norm in largest))

    def step(self, *, value_head_alone: bool = False) -> float:
        """Clip gradients, update the parameters and advance the schedule. Returns the gradient norm
        before clipping. Collective.

        value_head_alone: update the value head at its full rate; everything else, the schedule too,
        stays bit for bit. The first update of everything else is as if there were none before.
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if value_head_alone:
            for group in groups:
                # megatron-core's mark of a rate of its own
                group["lr"] = group["max_lr"] if group["is_decoupled_lr"] else 0.0
        elif not self.has_moved:
            _forget_moments(self.optimizer)
        updated, norm, _ = self.optimizer.step()
        assert updated, "finite gradients were refused"
        if value_head_alone:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        else:
            self.scheduler.step(increment=1)
        return float(norm)

    @property
    def learning_rate(self) -> float:
        """Learning rate of all parameters without a rate of their own."""
        return next(g["lr"] for g in self.optimizer.param_groups if not g["is_decoupled_lr"])


def build_updater(
    chunks: Sequence[VisionLanguageModel],
    settings: Optimizer,
    mesh: Mesh,
    *,
    num_steps: int,
    updates_per_step: int = 1,
    value_head_lr: float | None = None,
) -> Updater:
    """Build gradient buffers, optimizer and schedule of a model. Collective.

    The schedule counts training steps, of which the run has `num_steps`. value_head_lr: learning
    rate of a value head beside a policy, which starts at zero.

    Raises ValueError if nothing is trained on one of the pipeline stages.
    """
    if any_rank(not any(p.requires_grad for chunk in chunks for p in chunk.parameters())):
        raise ValueError(
            "lora.targets chooses nothing on one of the pipeline stages, whose optimizer could not "
            "be resumed: choose targets on every stage, or set parallel.pipeline=1"
        )
    warmup = settings.warmup_steps * updates_per_step
    wrapped = wrap(chunks)
    dtype = chunks[0].config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(config)
    if value_head_lr is not None:
        overrides[ParamKey(name="*value_head.*")] = {
            "max_lr": value_head_lr,
            "min_lr": min(settings.min_lr, value_head_lr),
            "is_decoupled_lr": True,
        }
    optimizer = get_megatron_optimizer(
        config, wrapped, config_overrides=overrides, use_gloo_process_groups=True
    )
    _make_moments(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(num_steps * updates_per_step, warmup + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    if warmup:
        scheduler.step(
            increment=1
        )  # megatron's schedule starts at 0: the first update would change nothing
    return Updater(wrapped, optimizer, scheduler, scheduler.num_steps, mesh)


def _make_moments(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments as zeros, so that a run whose first update is skipped can be saved."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # without parameters there is none
            part.init_state_fn(part.optimizer, part.config)


def _forget_moments(optimizer: MegatronOptimizer) -> None:
    """Zero Adam's moments and their step count. A checkpoint has one count for all parameters, so
    that it must not include updates of the value head alone.
    """
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            if "step" in group:  # fused implementations count by group
                group["step"] = 0
        for state in part.optimizer.state.values():
            for value in state.values():
                value.zero_()


def wrap(
    chunks: Sequence[VisionLanguageModel], *, shard_optimizer: bool = True
) -> list[DistributedDataParallel]:
    """Give each chunk contiguous fp32 gradient buffers, reduced over the data and context axes
    after the last microbatch.

    shard_optimizer: a data rank gets its shard of the reduced gradient; else all of it.
    """
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=shard_optimizer, grad_reduce_in_fp32=True
    )
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_gradients
    return [
        # Later chunks' gradients are ready while others compute: they need no smaller buckets.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def finalize_gradients(
    chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **_: Any
) -> None:
    """Sum gradients over the data and context axes, and the tower's over the tensor axis.

    Losses are already divided by their global number of tokens: megatron's count is not used.
    """
    finalize_model_grads(chunks, None)
    sum_tower_gradients(chunks[0].module)


def sum_tower_gradients(model: VisionLanguageModel) -> None:
    """Sum the tower's gradients over the tensor axis, each of whose ranks encoded a share of the
    images.
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

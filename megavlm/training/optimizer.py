"""Gradient buffers, distributed optimizer and learning-rate schedule, all megatron-core's."""

from collections.abc import Sequence
from dataclasses import dataclass
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

from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.collectives import any_rank


@dataclass(frozen=True)
class Updater:
    """What an update needs: this rank's chunks with their gradient buffers, the optimizer, the
    schedule.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    start: int  # the schedule's count before the first update

    @property
    def has_moved(self) -> bool:
        """Whether an update was made since the run's start, before a resume or after it."""
        return self.scheduler.num_steps > self.start

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients_are_finite(self) -> bool:
        """One answer for all ranks."""
        buffers = [
            buffer
            for chunk in self.chunks
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        return not any_rank(any(not buffer.grad_data.isfinite().all() for buffer in buffers))

    def step(self, *, value_head_alone: bool = False) -> float:
        """Clips, updates, moves the schedule on. Returns the gradient's norm before clipping.
        `value_head_alone`: everything else stays as it is, bit for bit, the schedule too; the head
        learns at its full rate. The first update of everything else is as if there had been none
        before.
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
        """Of what has none of its own."""
        return next(g["lr"] for g in self.optimizer.param_groups if not g["is_decoupled_lr"])


def build_updater(
    chunks: Sequence[VisionLanguageModel],
    settings: Any,
    *,
    num_steps: int,
    updates_per_step: int = 1,
    value_head_lr: float | None = None,
) -> Updater:
    """`settings`: the `optimizer` section. Its schedule counts training steps, of which the run has
    `num_steps`. `value_head_lr`: the rate of a value head beside a policy, which starts at nothing.
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
    return Updater(wrapped, optimizer, scheduler, start=scheduler.num_steps)


def _make_moments(optimizer: MegatronOptimizer) -> None:
    """Adam's, zero: a run whose first update is skipped has them to save too."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # without parameters there is none
            part.init_state_fn(part.optimizer, part.config)


def _forget_moments(optimizer: MegatronOptimizer) -> None:
    """Adam's, and their count, which corrects their bias: a checkpoint has one for all, so that the
    updates of a value head alone must not go on in it.
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
    """Contiguous fp32 gradient buffers, reduced over the data and context axes after the last
    microbatch.

    With `shard_optimizer` a data rank ends with its share of the reduced gradient, without it with
    all of it.
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
    """Sums gradients over the data and context axes, and what the tensor axis holds in parts.

    Losses come divided by their global number of tokens, so megatron's own count is left aside.
    """
    finalize_model_grads(chunks, None)
    sum_tower_gradients(chunks[0].module)


def sum_tower_gradients(model: VisionLanguageModel) -> None:
    """Each rank of the tensor axis encoded a share of the images, so it holds a part of the
    tower's gradient.
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

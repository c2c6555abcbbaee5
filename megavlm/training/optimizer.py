"""Updates of a model with megatron-core's gradient buffers, distributed optimizer and learning-rate
schedule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megavlm.checkpointing.optimizer_states import MOMENTS, make_states
from megavlm.config.optimizer import Optimizer
from megavlm.config.speculation import Speculation
from megavlm.data.packs.packing import Pack
from megavlm.models.common.components import model_part
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.collectives import any_rank, reduce_measures
from megavlm.parallel.mesh import Mesh
from megavlm.parallel.offload import Offloadable, distinct_storages
from megavlm.training.clipping import SeparateClipping
from megavlm.training.forward_backward import LossFunction, Measures, forward_backward
from megavlm.training.gradient_buffers import (
    begin_gather,
    finish_gather,
    reduce_gradients,
    without_reduction,
    wrap,
)
from megavlm.training.guards import SkipCounter
from megavlm.training.step.vision_features import VisionFeatures


class UpdateSchedule(OptimizerParamScheduler):
    """megatron-core's schedule of learning rate and weight decay, counted in updates.

    Only the count is restored from a checkpoint; rates and lengths come from this run's recipe. If
    the number of updates per step has changed, the count is converted, so that the schedule
    continues at the same step.
    """

    def __init__(self, *args: Any, updates_per_step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updates_per_step = updates_per_step
        # megatron's schedule starts at 0: the first update would change nothing
        self.start = _start(self.lr_warmup_steps)
        self.step(increment=self.start)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates_per_step": self._updates_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("updates_per_step", self._updates_per_step)  # absent in older ones
        updates = state["num_steps"] - _start(state["lr_warmup_steps"])
        self.num_steps = self.start + ceil(updates * self._updates_per_step / before)
        self.step(increment=0)


def _start(warmup: int) -> int:
    """Return a schedule's count before the first update."""
    return 1 if warmup else 0


@dataclass(frozen=True)
class Updater:
    """Updates a model: this rank's chunks with their gradient buffers, the optimizer and the
    schedule. offloads: If true, the optimizer's state is in host memory except during its step.
    clipping: The step of a model whose draft head is trained.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: UpdateSchedule
    mesh: Mesh
    skips: SkipCounter = field(default_factory=SkipCounter)
    offloads: bool = False
    clipping: SeparateClipping | None = None

    def __post_init__(self) -> None:
        if self.offloads:
            self._state.to_host()

    @cached_property
    def _state(self) -> Offloadable:
        return Offloadable(self.state_tensors)

    @contextmanager
    def state_on_device(self) -> Iterator[None]:
        """Move an offloaded optimizer state to the device within the context. Code that steps,
        saves or loads the optimizer must run in it.
        """
        if self.offloads:
            self._state.to_device()
        yield
        if self.offloads:
            self._state.to_host()

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's tensors. Views of parameters are left out: with an fp32 model the
        optimizer's main weights are such views.
        """
        parameters = (p for chunk in self.chunks for p in chunk.parameters())
        shared = {storage.data_ptr() for storage in distinct_storages(parameters)}
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is None:
                continue  # it has no parameters
            groups = (p for group in part.optimizer.param_groups for p in group["params"])
            states = (x for state in part.optimizer.state.values() for x in state.values())
            for tensor in (*groups, *states):
                if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in shared:
                    yield tensor

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
        """Accumulate the gradients of `packs` and apply them; see `apply`. Collective."""
        self.zero_gradients()
        reports = self.accumulate(packs, features, loss_function, scoring)
        return self.apply(reports, step=step, value_head_alone=value_head_alone)

    def accumulate(
        self,
        packs: Sequence[Pack],
        features: VisionFeatures,
        loss_function: LossFunction,
        scoring: Scoring | None = None,
        *,
        is_last: bool = True,
    ) -> list[Measures]:
        """Add the packs' gradients to the present ones, and reduce the sum with the last packs of
        an update. Returns the packs' measures. Collective.
        """
        if not packs:  # on every rank
            if is_last:
                reduce_gradients(self.chunks)
            return []
        with nullcontext() if is_last else without_reduction(self.chunks):
            return forward_backward(
                self.chunks, packs, features, scoring or Scoring(), loss_function
            )

    def apply(
        self,
        reports: Sequence[Measures],
        *,
        step: int,
        scale: float = 1.0,
        value_head_alone: bool = False,
    ) -> dict[str, float]:
        """Make at most one optimizer step with the accumulated gradients times `scale`. Returns
        measures summed over all ranks. Collective.

        The optimizer step is skipped if a gradient is not finite (`skipped_updates`), or if the
        loss reports `signal` and no token has any (`updates_without_signal`). In the second case
        Adam, which divides by the gradient's size, would turn rounding errors or the earlier
        gradients in its moments into a full step. A skipped step does not advance the schedule.
        Raises NotFiniteError, which names `step`, after too many non-finite updates in a row.

        reports: Measures from `accumulate`. value_head_alone: Update the value head only; see
        `step`.
        """
        if scale != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(scale)
            reports = [report | {"loss": scale * report["loss"]} for report in reports]
        self.finish()  # gathers that no forward has waited for, such as an unused tower's
        measures = reduce_measures(reports, self.mesh)
        skipped = not self.gradients_are_finite()
        self.skips.record(skipped, step)
        without_signal = not skipped and measures.get("signal", 1.0) == 0
        measures["skipped_updates"] = float(skipped)
        measures["updates_without_signal"] = float(without_signal)
        measures["learning_rate"] = self.learning_rate
        norms = {"gradient_norm": float("nan") if skipped else 0.0}
        if not skipped and not without_signal:
            norms = self.step(value_head_alone=value_head_alone)
        for chunk in self.chunks:
            begin_gather(chunk)  # after a skipped update too, to keep one order of collectives
        return measures | norms

    def finish(self) -> None:
        """Block until this rank has all updated parameters. Call it before reading parameters other
        than by a forward pass.
        """
        for chunk in self.chunks:
            finish_gather(chunk)

    @property
    def has_moved(self) -> bool:
        """True if the run has made an update, before or after a resume."""
        return self.scheduler.num_steps > self.scheduler.start

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
        finite = torch.stack([norm.isfinite() for norm in largest])
        return not any_rank(~finite.all())

    def step(self, *, value_head_alone: bool = False) -> dict[str, float]:
        """Clip gradients, update the parameters and advance the schedule. Returns `gradient_norm`
        before clipping, and `draft_gradient_norm` if the draft head is trained. Collective.

        value_head_alone: Update the value head at its full learning rate; all other parameters and
        the schedule stay bit for bit the same. The first update of the other parameters later
        starts from zero moments, as if nothing had been updated before.
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if value_head_alone:
            for group in groups:
                # megatron-core's flag for a group with its own learning rate
                group["lr"] = group["max_lr"] if group["is_decoupled_lr"] else 0.0
        with self.state_on_device():
            if not value_head_alone and not self.has_moved:
                _forget_moments(self.optimizer)
            if self.clipping is not None:
                names = ("gradient_norm", "draft_gradient_norm")
                norms = dict(zip(names, self.clipping.step(), strict=True))
            else:
                updated, norm, _ = self.optimizer.step()
                assert updated, "finite gradients were refused"
                norms = {"gradient_norm": float(norm)}
        if value_head_alone:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        else:
            self.scheduler.step(increment=1)
        return norms

    @property
    def learning_rate(self) -> float:
        """Learning rate of all parameters without a rate of their own."""
        return float(self.scheduler.get_lr({}))


def build_updater(
    chunks: Sequence[VisionLanguageModel],
    settings: Optimizer,
    mesh: Mesh,
    *,
    num_steps: int,
    updates_per_step: int = 1,
    value_head_lr: float | None = None,
    speculation: Speculation | None = None,
) -> Updater:
    """Build gradient buffers, optimizer and schedule of a model. Collective.

    num_steps: Training steps of the whole run, the length of the schedule. value_head_lr: Learning
    rate of a value head on a policy. A new value head predicts 0. speculation: Rate and clipping of
    the draft head; None without one.

    Raises ValueError if one of the pipeline stages has no trainable parameters, or if the
    optimizer's settings do not support the model's dtypes.
    """
    if any_rank(not any(p.requires_grad for chunk in chunks for p in chunk.parameters())):
        raise ValueError(
            "lora.targets chooses nothing on one of the pipeline stages, whose optimizer could not "
            "be resumed: choose targets on every stage, or set parallel.pipeline=1"
        )
    options = settings.megatron_options
    if options["use_precision_aware_optimizer"] and not options["grad_reduce_in_fp32"]:
        _check_one_dtype(chunks)
    warmup = settings.warmup_steps * updates_per_step
    wrapped = wrap(chunks, settings)
    dtype = chunks[0].config.params_dtype
    dtypes = {key: getattr(torch, options[key]) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    config = OptimizerConfig(
        **{key: options[key] for key in options if hasattr(OptimizerConfig, key)} | dtypes,
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(config)
    if dtype != torch.float32:
        # megatron-core's optimizer confuses parameter states if a group has both dtypes. Any
        # override, even with the default value, puts fp32 parameters in a group of their own.
        kept = ParamPredicate("kept in fp32", lambda parameter: parameter.dtype == torch.float32)
        overrides[ParamKey(predicate=kept)] = {"start_wd": settings.weight_decay}
    for part, rate in (("tower", settings.tower_lr), ("merger", settings.merger_lr)):
        if rate is not None:
            overrides[ParamKey(predicate=_part_predicate(chunks, part))] = {
                "max_lr": rate,
                "min_lr": min(settings.min_lr, rate),
                "lr_mult": rate / settings.lr,  # not read, but it tells loaded groups apart
            }
    if value_head_lr is not None:
        overrides[ParamKey(name="*value_head.*")] = {
            "max_lr": value_head_lr,
            "min_lr": min(settings.min_lr, value_head_lr),
            "is_decoupled_lr": True,
        }
    if speculation is not None:
        overrides[ParamKey(name="*draft_head.*")] = {
            "max_lr": speculation.lr,
            "min_lr": min(settings.min_lr, speculation.lr),
            "lr_mult": speculation.lr / settings.lr,  # as above
        }
    optimizer = get_megatron_optimizer(
        config, wrapped, config_overrides=overrides, use_gloo_process_groups=True
    )
    _make_moments(optimizer)
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params = partial(_copy_main_weights, part)
    scheduler = UpdateSchedule(
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
        updates_per_step=updates_per_step,
    )
    clipping = None
    if speculation is not None:
        heads = [chunk.draft_head for chunk in chunks if chunk.draft_head is not None]
        parameters = [x for head in heads for x in head.parameters()]
        clipping = SeparateClipping(optimizer, parameters, speculation.clip_grad)
    return Updater(
        wrapped, optimizer, scheduler, mesh, offloads=settings.offload, clipping=clipping
    )


def _part_predicate(chunks: Sequence[VisionLanguageModel], part: str) -> ParamPredicate:
    """Return a predicate that is true for the parameters of a part (see components.model_part)."""
    chosen = {
        id(parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if model_part(name) == part
    }
    return ParamPredicate(part, lambda parameter: id(parameter) in chosen)


def _check_one_dtype(chunks: Sequence[VisionLanguageModel]) -> None:
    """Raise ValueError if gradients would have two dtypes: Transformer Engine's norm and clipping
    assume a single one. Collective.
    """
    trained = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    if any_rank(any(p.dtype == torch.float32 for p in trained)):
        raise ValueError(
            "optimizer.megatron.use_precision_aware_optimizer=true reads gradients as they are "
            "reduced, but with optimizer.megatron.grad_reduce_in_fp32=false those of this model "
            "are of two dtypes, as some of its parameters stay in float32: change one of them"
        )


def _make_moments(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments as zeros, so that a run whose first update is skipped can be saved."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue  # it has no parameters
        if part.config.use_precision_aware_optimizer:
            make_states(part)
        else:
            part.init_state_fn(part.optimizer, part.config)


def _copy_main_weights(part: Any) -> None:
    """Round main weights to the model's weights, which megatron-core copies one by one. An fp32
    model's weights are main weights, and a precision-aware optimizer writes weights itself.
    """
    if part.is_stub_optimizer or part.config.use_precision_aware_optimizer:
        return
    groups = zip(part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    for weights, main_weights in groups:
        if weights:
            torch._foreach_copy_(weights, main_weights)


def _forget_moments(optimizer: MegatronOptimizer) -> None:
    """Zero Adam's moments and their step count. A checkpoint has one step count for all parameters,
    so it must not include updates of only the value head.
    """
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            if "step" in group:  # fused implementations count by group
                group["step"] = 0
        states = part.optimizer.state.values()
        torch._foreach_zero_([state[name] for state in states for name in MOMENTS])

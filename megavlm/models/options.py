"""The configuration as the model's own options."""

import torch

from megavlm.config.schema import Config
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.lora import LoRA
from megavlm.parallel import platform
from megavlm.parallel.mesh import Layout


def layout(config: Config) -> Layout:
    """ValueError for one that this machine's collectives cannot do."""
    parallel = config.parallel
    cut, together = parallel.expert_tensor, parallel.tensor * parallel.context
    if cut > 1 and together % cut and not platform.has_gpu():
        raise ValueError(
            f"parallel.expert_tensor={cut} cuts experts over data ranks, whose tokens differ in "
            "number, and gloo gathers equal numbers only: on a CPU set it to 1 or to a divisor of "
            f"parallel.tensor x parallel.context = {together}"
        )
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=cut,
    )


def model_options(config: Config) -> ModelOptions:
    model, parallel, recompute = config.model, config.parallel, config.recompute
    attention = model.attention
    if attention == "auto":
        # flash kernels take half precision only
        flash = platform.has_gpu() and model.dtype == "bfloat16"
        attention = "flash" if flash else "sdpa"
    return ModelOptions(
        dtype=getattr(torch, model.dtype),
        sequence=parallel.sequence,
        attention=attention,
        recompute=recompute.language,
        recompute_modules=recompute.modules,
        recompute_layers=recompute.layers,
        recompute_tower=recompute.tower,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        freeze_tower=model.freeze_tower,
        freeze_merger=model.freeze_merger,
        grouped_experts=config.lora.rank == 0
        or not any("experts" in target for target in config.lora.targets),
    )


def lora(config: Config) -> LoRA | None:
    """None where the weights themselves are trained."""
    settings = config.lora
    if settings.rank == 0:
        return None
    return LoRA(settings.rank, settings.alpha, settings.dropout, settings.targets)

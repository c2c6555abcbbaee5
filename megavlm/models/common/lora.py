"""LoRA: a frozen model with small trained adapters. With its adapters disabled, it is the model
that they were added to.

Add adapters after the model's weights are loaded and before its gradient buffers are allocated.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from megavlm.config.lora import LoRA
from megavlm.models.common.lora_grouped import GroupedLoRALinear
from megavlm.models.common.lora_linear import (
    EXPERT_STREAM,
    Adapter,
    LoRALinear,
    LoRAPart,
    stable_seed,
)
from megavlm.models.common.lora_targets import LoRATarget, adapted_layers, choose, linear_names
from megavlm.models.common.model import VisionLanguageModel


def add_adapters(model: VisionLanguageModel, settings: LoRA, *, seed: int = 0) -> None:
    """Freeze the model except its value head and its draft head, and add adapters to this rank's
    linear layers that match `settings.targets`.

    model: The part of a model that a pipeline stage, or one chunk of it, holds.
    seed: Seed of the initial A. A does not depend on the layout.

    B is zero, so that outputs do not change at first. Raises ValueError for a target that matches
    nothing in the whole model.
    """
    assert not any(adapters(model)), "this model has adapters already"
    tower = model.visual
    names = linear_names(model.config, tower)
    chosen = choose(settings.targets, names, has_tower=tower is not None)
    found = list(adapted_layers(model, chosen))
    model.requires_grad_(False)
    if model.value_head is not None:
        model.value_head.requires_grad_(True)  # it starts at zero and must be trained
    if model.draft_head is not None:
        model.draft_head.requires_grad_(True)
    for target in found:
        setattr(target.owner, target.attribute, _adapted(target, settings, seed))
    if any(target.placement.is_expert for target in found):
        _add_expert_stream(seed, model.language_model.pg_collection.ep.rank())


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name, adapter) of this rank's adapted linear layers, with names in the whole model.

    For a dense layer, `NAME.weight` is the key of its weight in checkpoints and in the mapping
    table. The name of an expert's layer has the expert's number in the whole model:
    `...mlp.experts.5.linear_fc1`.
    """
    for module in model.modules():
        if isinstance(module, LoRALinear):
            yield from module.adapters()


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable adapters within the context. The model then equals its base model bit for bit."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    switched = [layer for layer in layers if layer.enabled]
    for layer in switched:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in switched:
            layer.enabled = True


def _adapted(target: LoRATarget, settings: LoRA, seed: int) -> LoRALinear:
    scale = settings.alpha / settings.rank
    base = getattr(target.owner, target.attribute)
    options: dict[str, Any] = {
        "name": target.name,
        "parts": [LoRAPart(name, rows, settings.rank, scale) for name, rows in target.parts],
        "placement": target.placement,
        "dropout": settings.dropout,
        "seed": seed,
    }
    if target.experts is not None:
        return GroupedLoRALinear(base, ranks=target.experts, **options)
    return LoRALinear(base, num_blocks=target.num_blocks, order=target.order, **options)


def _add_expert_stream(seed: int, expert_rank: int) -> None:
    """Add a random stream for the dropout of experts. megatron-core's stream differs over the
    expert tensor axis, but its ranks must drop the same entries of the tokens that they share.
    """
    tracker = get_cuda_rng_tracker()
    if EXPERT_STREAM in tracker.get_states():
        return  # added with another chunk of this stage
    tracker.add(EXPERT_STREAM, stable_seed(f"{EXPERT_STREAM}/{seed}/{expert_rank}"))

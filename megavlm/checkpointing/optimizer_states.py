"""States of megatron-core's precision-aware optimizer, in the form in which every other one saves
and loads them: main weights and two moments in fp32.

The optimizer keeps of a bfloat16 weight's fp32 main weight only the lower 16 bits, so that both
together are the main weight, without loss. megatron-core 0.16.1 takes those bits for the main
weight when it saves, cannot load them, and cannot create states of Transformer Engine 2.11.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_states(part: Any) -> None:
    """Create the states of a precision-aware DistributedOptimizer, moments as zeros, and have it
    save and load them by the functions of this module.
    """
    adam = part.optimizer
    for group in adam.param_groups:
        for shard in group["params"]:
            is_half = shard.dtype == torch.bfloat16
            adam.initialize_state(shard, is_half)
            if not is_half:
                del adam.state[shard]["master_param"]  # a copy that no update would change
    part._get_main_param_and_optimizer_states = partial(_get, part)
    part._set_main_param_and_optimizer_states = partial(_set, part)


def join(weight: Tensor, lower: Tensor) -> Tensor:
    """Return main weights in fp32 of bfloat16 weights, each main weight's upper half rounded to the
    nearest, and their lower halves in int16, negative where the upper was rounded up.
    """
    return ((weight.view(torch.int16).int() << 16) + lower).view(torch.float32)


def lower_half(main: Tensor, weight: Tensor) -> Tensor:
    """Return the lower halves [as int16] of main weights in fp32 whose bfloat16 weights are given.

    A main weight in the middle between two bfloat16 numbers, whose weight was rounded down, moves
    by its last bit: int16 ends there.
    """
    difference = main.view(torch.int32) - (weight.view(torch.int16).int() << 16)
    assert difference.abs().max() <= 2**15, "main weights are of other weights"
    return difference.clamp(max=2**15 - 1).short()


def _get(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's main weight and moments in fp32, as far as this rank's shard goes."""
    shard, state = _shard(part, parameter)
    main = join(shard, state["master_param"]) if "master_param" in state else shard
    return {"param": main} | {name: state[name].float() for name in MOMENTS}


def _set(part: Any, parameter: Tensor, values: Mapping[str, Tensor]) -> None:
    """Load what `_get` returns. The weight is loaded already."""
    shard, state = _shard(part, parameter)
    for name in MOMENTS:
        state[name].copy_(values[name])
    if "master_param" in state:
        main = values["param"].to(shard.device)
        state["master_param"].copy_(lower_half(main, shard))
    else:
        shard.detach().copy_(values["param"])


def _shard(part: Any, parameter: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    group, place = part.model_param_group_index_map[parameter]
    shard = part.optimizer.param_groups[group]["params"][place]
    return shard, part.optimizer.state[shard]

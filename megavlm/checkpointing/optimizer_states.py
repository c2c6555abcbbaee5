"""Saves and loads the states of megatron-core's precision-aware optimizer in the form that other
optimizers have: main weights and two moments in fp32.

For a bfloat16 weight, the optimizer stores only the lower 16 bits of its fp32 main weight; together
with the weight they give the main weight without loss. megatron-core 0.16.1 saves these bits as if
they were the main weight, cannot load them, and cannot create the states of Transformer Engine
2.11.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_states(part: Any) -> None:
    """Create the states of a precision-aware DistributedOptimizer with zero moments, and make it
    save and load them with the functions of this module.
    """
    adam = part.optimizer
    for group in adam.param_groups:
        for shard in group["params"]:
            is_half = shard.dtype == torch.bfloat16
            adam.initialize_state(shard, is_half)
            if not is_half:
                del adam.state[shard]["master_param"]  # a copy that updates would not change
    part._get_main_param_and_optimizer_states = partial(_get, part)
    part._set_main_param_and_optimizer_states = partial(_set, part)


def join(weight: Tensor, lower: Tensor) -> Tensor:
    """Join bfloat16 weights and int16 lower halves to main weights in fp32.

    A bfloat16 weight is the upper half of its main weight, rounded to nearest. The lower half is
    negative if the upper half was rounded up.
    """
    return ((weight.view(torch.int16).int() << 16) + lower).view(torch.float32)


def lower_half(main: Tensor, weight: Tensor) -> Tensor:
    """Return the lower halves in int16 of fp32 main weights, given their bfloat16 weights.

    A main weight in the middle between two bfloat16 numbers whose weight was rounded down changes
    by its last bit, because its lower half, 2^15, is above the range of int16.
    """
    difference = main.view(torch.int32) - (weight.view(torch.int16).int() << 16)
    assert difference.abs().max() <= 2**15, "main weights are of other weights"
    return difference.clamp(max=2**15 - 1).short()


def _get(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the main weight and moments in fp32 of this rank's shard of a parameter."""
    shard, state = _shard(part, parameter)
    main = join(shard, state["master_param"]) if "master_param" in state else shard
    return {"param": main} | {name: state[name].float() for name in MOMENTS}


def _set(part: Any, parameter: Tensor, values: Mapping[str, Tensor]) -> None:
    """Load the values that `_get` returns. The weight must be loaded before."""
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

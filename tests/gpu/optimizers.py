"""Seconds and memory of the optimizer's step by the keys that save its memory, and whether they
make the same updates, on the first four layers of a model with made-up gradients.
"""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megavlm.config.optimizer import Optimizer
from megavlm.models.common.config import ModelOptions
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from megavlm.training.optimizer import Updater, build_updater
from tests.gpu import model

LR = 1e-3
OFFLOAD = "optimizer state on the host outside its step"
AWARE = {"use_precision_aware_optimizer": True}
SAVINGS: dict[str, dict[str, Any]] = {
    OFFLOAD: {"offload": True},
    "main weights in 16 bits besides the weights": {"megatron": AWARE},
    "and both moments in bfloat16": {
        "megatron": AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    },
}


def savings(config: Any, measured: Any) -> Iterator[dict[str, Any]]:
    """Yield a row of each saving. Raises AssertionError if a key changes the updates."""
    config = copy.deepcopy(config)
    text = config.text_config
    text.num_hidden_layers = min(4, text.num_hidden_layers)
    has_engine = model.has_transformer_engine()
    off, expected = step(config, {}, measured)
    for saving, keys in SAVINGS.items():
        if "megatron" in keys and not has_engine:
            continue
        on, found = step(config, keys, measured)
        if saving == OFFLOAD:
            assert all(map(torch.equal, found, expected)), saving
        # The kernels round differently; of moments, 9 bits are kept.
        bound = 2**-6 * LR if "exp_avg_dtype" in keys.get("megatron", {}) else 1e-5 * LR
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=bound)
        yield {"saving": saving, "on": on, "off": off}


def step(config: Any, keys: dict[str, Any], measured: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the row of a step, and the main weights after some, on the host."""
    gc.collect()  # of the last one
    platform.free_cached_memory()
    mesh, options = build_mesh(), ModelOptions(dtype=torch.bfloat16)  # seeds the weights
    chunks = model.build(config, mesh, options, engine=model.has_transformer_engine())
    updater = build_updater(chunks, Optimizer(lr=LR, clip_grad=1.0, **keys), mesh, num_steps=99)
    buffers = [buffer for chunk in updater.chunks for buffer in chunk.buffers]
    generator = torch.Generator(platform.device().type).manual_seed(0)

    def work() -> None:
        updater.zero_gradients()
        for buffer in buffers:
            buffer.grad_data.normal_(generator=generator)
        updater.step()

    row, weights = measured(work), main_weights(updater)
    model.let_go(updater.chunks)
    return row, weights


def main_weights(updater: Updater) -> list[Tensor]:
    with updater.state_on_device():
        return [
            part._get_main_param_and_optimizer_states(parameter)["param"].detach().cpu().clone()
            for part in updater.optimizer.chained_optimizers
            if part.optimizer is not None
            for parameter in part.model_param_group_index_map
        ]

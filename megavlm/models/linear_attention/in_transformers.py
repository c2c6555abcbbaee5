"""Linear attention in the models of transformers."""

import inspect
import sys
from typing import Any

_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def use_plain_torch(model: Any) -> None:
    """Make transformers compute the linear attention of a model's family with its own torch
    operations, for the rest of the process. Does nothing for a model without linear attention.

    If flash-linear-attention or causal-conv1d is installed, transformers calls their kernels for
    tensors on any device, but they fail on a CPU.
    """
    module = sys.modules[type(model).__module__]
    for name in _FUNCTIONS:
        if hasattr(module, name):
            setattr(module, name, inspect.unwrap(getattr(module, name)))

"""Linear attention of transformers' own models."""

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
    """Have transformers compute linear attention of a model's family by its own torch operations,
    for the rest of the process. A model of another family is left as it is.

    Where flash-linear-attention or causal-conv1d can be imported, transformers calls their kernels
    on tensors of any device, and they fail on a CPU's.
    """
    module = sys.modules[type(model).__module__]
    for name in _FUNCTIONS:
        if hasattr(module, name):
            setattr(module, name, inspect.unwrap(getattr(module, name)))

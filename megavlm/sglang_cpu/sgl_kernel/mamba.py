"""Stand-in for `sgl_kernel.mamba`: only the functions that Qwen3.5 calls can be called."""

from collections.abc import Callable
from typing import NoReturn

from . import missing
from .gated_delta_net import (  # noqa: F401
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"mamba.{name}")

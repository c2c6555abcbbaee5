"""Stand-in for `transformer_engine_torch`, the compiled module of Transformer Engine."""

import sys
from types import ModuleType
from typing import Any

from tests.gpu_path import gemm, kernels, names

NAME = "transformer_engine_torch"
NAMED = ("layernorm_fwd", "layernorm_bwd")  # where the module's names are copied
ONNX = "transformer_engine.pytorch.onnx_extensions"  # needs onnx, for an export that nothing calls


class StandIn(ModuleType):
    """Module whose missing names are absent classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, names.absent(name))
        return getattr(self, name)


def install() -> None:
    """Make `import transformer_engine_torch` give the kernels and enumerations of this folder."""
    sys.modules[ONNX] = StandIn(ONNX)
    sys.modules[NAME] = extension = StandIn(NAME)
    for name in NAMED:
        setattr(extension, name, names.absent(name))
    for module in (gemm, kernels, names):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_"):
                setattr(extension, name, value)

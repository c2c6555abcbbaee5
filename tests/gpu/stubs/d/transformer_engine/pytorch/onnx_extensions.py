"""Stand-in for Transformer Engine's export to ONNX, which needs onnxscript and is never called."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: the GPU kit comes without ONNX")

    return refuse

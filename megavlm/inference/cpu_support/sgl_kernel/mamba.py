"""`sgl_kernel.mamba`, import-only like its package."""

from collections.abc import Callable
from typing import NoReturn

from . import missing


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"mamba.{name}")

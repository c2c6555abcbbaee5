"""Start-up hook for SGLang's processes on a machine without a GPU.

Python imports `sitecustomize` in every process whose PYTHONPATH holds this directory: in the server
and in the workers that it starts. Stock SGLang needs exactly three things, and gets two more:

1. torchvision must be importable beside a CPU build of torch: its two missing operators are
   defined right before the first `import torchvision`, never earlier, so that a process that does
   not use torchvision does not import torch for it.
2. `sgl_kernel` must be importable: the directory beside this file holds an import-only stand-in.
3. Its adapters ask for pinned memory, which needs a GPU build of torch: they get pageable memory.
4. Its vision towers attend image by image (segment_attention.py), not over all images of a batch.
5. Its workers are forked: spawned ones import torch and SGLang again, 10 s each. Without a GPU and
   with one thread (OMP_NUM_THREADS) nothing in the process forbids that.
"""

import importlib.abc
import importlib.util
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def _load_torchvision_ops() -> ModuleType:
    """Load the module by its path: megavlm itself need not be importable in these processes."""
    path = Path(__file__).resolve().parents[2] / "parallel" / "torchvision_ops.py"
    spec = importlib.util.spec_from_file_location("_torchvision_ops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the operators live as long as the module
    spec.loader.exec_module(module)
    return module


class PinnedMemoryHook(importlib.abc.MetaPathFinder):
    """Import hook: torch's factories ignore `pin_memory` from SGLang's first adapter import on."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            for name in ("tensor", "empty", "zeros"):
                setattr(torch, name, _unpinned(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
        return None


class VisionAttentionHook(importlib.abc.MetaPathFinder):
    """Import hook: SGLang's vision attention is replaced as soon as its module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "sglang.srt.layers.attention.vision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            import segment_attention  # type: ignore[import-not-found]

            segment_attention.install()

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _unpinned(factory: Any) -> Any:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return call


def _fork_workers(method: str | None, force: bool = False) -> None:
    """Set multiprocessing's start method: "fork" where "spawn" is asked for."""
    _set_start_method("fork" if method == "spawn" else method, force=force)


_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = _fork_workers
_load_torchvision_ops().install_hook()
sys.meta_path[:0] = [PinnedMemoryHook(), VisionAttentionHook()]

"""Start-up hook for SGLang's processes on a machine without a GPU.

Python imports `sitecustomize` in every process whose PYTHONPATH holds this directory: in the server
and in the workers that it starts. Stock SGLang needs exactly four things, and gets six more:

1. torchvision must be importable beside a CPU build of torch: its two missing operators are
   defined right before the first `import torchvision`, never earlier, so that a process that does
   not use torchvision does not import torch for it.
2. `sgl_kernel` must be importable: the directory beside this file holds an import-only stand-in.
3. Its adapters ask for pinned memory, which needs a GPU build of torch: they get pageable memory.
4. Two kernels of Qwen3.5 that exist for GPUs alone are PyTorch's operations.
5. Its vision towers attend image by image (segment_attention.py), not over all images of a batch.
6. Its workers are forked: spawned ones import torch and SGLang again, 10 s each. Without a GPU and
   with one thread (OMP_NUM_THREADS) nothing in the process forbids that.
7. Its sequences attend to the KV cache many at a time (cache_attention.py), not one by one.
8. It looks for models and for processors of images among those of the Qwen families alone: to
   import all 300, in two processes, takes a quarter of its start.
9. It draws a token with one random number (cumulative_sampling.py), not one for each token of the
   vocabulary.
10. While requests are retracted or stand still for a weight update it sleeps until one comes, as
   when it is idle: it would take a whole core from that update.
"""

import importlib
import importlib.abc
import importlib.util
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
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


class ReplacementHook(importlib.abc.MetaPathFinder):
    """Import hook: parts of SGLang's modules are replaced as soon as these have run."""

    def __init__(self, replacements: dict[str, Callable[[ModuleType], None]]) -> None:
        self._replacements = replacements

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        replace = self._replacements.pop(fullname, None)
        if replace is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            replace(module)

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _install(name: str) -> Callable[[Any], None]:
    """Return a replacement by the module of that name beside this file, imported when it is due."""
    return lambda module: importlib.import_module(name).install(module)


def _gate_shared_expert(module: Any) -> None:
    def launch(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        gated = (hidden.float() @ weight.float()).sigmoid()[:, None] * shared.float()
        output.copy_(output.float() + gated if do_add else gated)

    module._launch_fused_gate_sigmoid_mul = launch


def _gate_norm(module: Any) -> None:
    """Have the gated norm take its branch for CPUs, as it does by itself on one with AMX."""
    module._use_cpu = True


def _sleep_in_pause(module: Any) -> None:
    """Have a paused scheduler wait for a request. SGLang 0.5.23 looks for one without a break."""
    own = module.Scheduler.process_input_requests

    def process(scheduler: Any, requests: list[Any]) -> None:
        own(scheduler, requests)
        if scheduler._engine_paused and not requests:
            scheduler.maybe_sleep_on_idle()

    module.Scheduler.process_input_requests = process


REPLACEMENTS = {
    "sglang.srt.managers.scheduler": _sleep_in_pause,
    "sglang.srt.layers.attention.vision": _install("segment_attention"),
    "sglang.srt.layers.attention.torch_native_backend": _install("cache_attention"),
    "sglang.srt.layers.sampler": _install("cumulative_sampling"),
    "sglang.kernels.ops.attention.fla.layernorm_gated": _gate_norm,
    "sglang.kernels.ops.elementwise.elementwise": _gate_shared_expert,
}
# Packages of which SGLang imports all modules, with the dot after their name.
SEARCHED = ("sglang.srt.models.", "sglang.srt.multimodal.processors.")


def _unpinned(factory: Any) -> Any:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return call


def _list_qwen_alone(path: Any = None, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
    for module in _iter_modules(path, prefix):
        if prefix not in SEARCHED or "qwen" in module.name:
            yield module


def _fork_workers(method: str | None, force: bool = False) -> None:
    """Set multiprocessing's start method: "fork" where "spawn" is asked for."""
    _set_start_method("fork" if method == "spawn" else method, force=force)


_iter_modules = pkgutil.iter_modules
pkgutil.iter_modules = _list_qwen_alone
_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = _fork_workers
_load_torchvision_ops().install_hook()
sys.meta_path[:0] = [PinnedMemoryHook(), ReplacementHook(dict(REPLACEMENTS))]

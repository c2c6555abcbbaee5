"""Start-up hook for SGLang's processes on a machine without a GPU.

Python imports `sitecustomize` in every process whose PYTHONPATH contains this directory: the server
and the workers that it starts. Stock SGLang needs the first four changes and the last two to run on
a CPU; the other seven save time:

1. torchvision must be importable with a CPU build of torch: its two missing operators are defined
   right before the first `import torchvision`, never earlier, so that a process that does not use
   torchvision does not import torch for it.
2. `sgl_kernel` must be importable: this directory contains a stand-in for it.
3. SGLang's LoRA code asks for pinned memory, but that needs a GPU build of torch: it gets pageable
   memory. It also ends a server whose requests with one adapter on experts have more than 256
   tokens together, because it asserts the length of a launch that only GPUs need.
4. Two kernels of Qwen3.5, and the kernels of adapters on experts and of block FP8, exist only for
   GPUs: they are replaced by PyTorch operations.
5. Vision towers attend image by image (segment_attention.py), not over all images of a batch.
6. Workers are forked: spawned workers import torch and SGLang again, 10 s each. Forking is safe
   without a GPU and with one thread (OMP_NUM_THREADS).
7. Many sequences attend to the KV cache in one call (cache_attention.py), not one by one.
8. SGLang searches only the modules of the served family (MEGAVLM_SERVED_MODULES) for models and
   image processors: importing all 300, in two processes, takes a quarter of its start.
9. While requests are retracted or paused for a weight update, the scheduler sleeps until a request
   comes, as when it is idle. Otherwise it would take a whole core from that update.
10. SGLang does not import `mcp`, which takes a second and is only for tools that a server calls
   itself. It is installed here for tools that episodes call.
11. Functions are not compiled: the first request would wait 20 s for a C++ compiler, and importing
   torch's compiler takes a second in each process.
12. Records of the experts of each token (enable_return_routed_experts) are in plain memory.
13. Speculative decoding gets PyTorch operations for its kernels, and samples at a request's
   temperature (speculation.py). SGLang has such kernels for CPUs with AMX, and takes the likeliest
   tokens there.
"""

import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def _load_torchvision_ops() -> ModuleType:
    """Load the module by its path, because megavlm need not be importable in these processes."""
    path = Path(__file__).resolve().parents[1] / "parallel" / "torchvision_ops.py"
    spec = importlib.util.spec_from_file_location("_torchvision_ops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the operators exist as long as the module
    spec.loader.exec_module(module)
    return module


class ReplacementHook(importlib.abc.MetaPathFinder):
    """Import hook that replaces parts of SGLang's modules right after they are imported."""

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


def _install(name: str, function: str = "install") -> Callable[[Any], None]:
    """Return a replacement that imports module `name` of this directory and calls its function."""
    return lambda module: getattr(importlib.import_module(name), function)(module)


def _gate_shared_expert(module: Any) -> None:
    def launch(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        gated = (hidden.float() @ weight.float()).sigmoid()[:, None] * shared.float()
        output.copy_(output.float() + gated if do_add else gated)

    module._launch_fused_gate_sigmoid_mul = launch


def _gate_norm(module: Any) -> None:
    """Make the gated norm take its CPU branch, as it does by itself on a CPU with AMX."""
    module._use_cpu = True


def _compile_nothing(module: Any) -> None:
    """Make `torch.compile` return its function, with and without options."""
    module.compile = lambda function=None, **options: function or (lambda decorated: decorated)


def _pin_nothing(module: Any) -> None:
    """Make torch's factories ignore `pin_memory`, for SGLang's LoRA code."""
    import torch

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]


def _unpinned(factory: Any) -> Any:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return call


def _allocate_on_the_host(module: Any) -> None:
    """Give the records of routed experts plain memory. SGLang only has pinned memory of GPUs."""
    import torch

    module.ALLOC_MEMORY_FUNCS = {"cpu": lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)}


def _cover_merged_requests(module: Any) -> None:
    """Let requests with one adapter have any number of tokens together. SGLang's backend for CPUs
    merges them to one segment, but SGLang asserts that segments are no longer than a request.
    """
    compute = module._compute_moe_lora_info

    def compute_for_all(num_tokens: int, *inputs: Any, max_len: int, **options: Any) -> Any:
        return compute(num_tokens, *inputs, max_len=max(max_len, num_tokens), **options)

    module._compute_moe_lora_info = compute_for_all


def _sleep_in_pause(module: Any) -> None:
    """Make a paused scheduler sleep until a request comes. SGLang 0.5.23 polls without a break."""
    own = module.Scheduler.process_input_requests

    def process(scheduler: Any, requests: list[Any]) -> None:
        own(scheduler, requests)
        if scheduler._engine_paused and not requests:
            scheduler.maybe_sleep_on_idle()

    module.Scheduler.process_input_requests = process


REPLACEMENTS = {
    "torch": _compile_nothing,
    "sglang.srt.managers.scheduler": _sleep_in_pause,
    "sglang.srt.layers.attention.vision": _install("segment_attention"),
    "sglang.srt.layers.attention.torch_native_backend": _install("cache_attention"),
    "sglang.srt.state_capturer.base": _allocate_on_the_host,
    "sglang.srt.speculative.eagle_utils": _install("speculation", "sample_at_temperature"),
    "sglang.srt.speculative.draft_utils": _install("speculation", "draft_by_own_attention"),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": _install(
        "speculation", "keep_accepted_states"
    ),
    "sglang.srt.lora.backend.base_backend": _cover_merged_requests,
    "sglang.srt.lora.lora_manager": _pin_nothing,
    "sglang.srt.lora.layers": _install("expert_adapters"),
    "sglang.srt.layers.quantization.fp8": _install("dequantisation"),
    "sglang.kernels.ops.attention.fla.layernorm_gated": _gate_norm,
    "sglang.kernels.ops.elementwise.elementwise": _gate_shared_expert,
}
# Packages of which SGLang imports all modules, as prefixes with a dot.
SEARCHED = ("sglang.srt.models.", "sglang.srt.multimodal.processors.")
# Parts of the names of the modules in them that serve the model and its draft model, joined by
# commas. Every name contains the default.
SERVED = os.environ.get("MEGAVLM_SERVED_MODULES", "").split(",")


def _list_served(path: Any = None, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
    for module in _iter_modules(path, prefix):
        if prefix not in SEARCHED or any(part in module.name for part in SERVED):
            yield module


def _fork_workers(method: str | None, force: bool = False) -> None:
    """Set multiprocessing's start method, with "fork" instead of "spawn"."""
    _set_start_method("fork" if method == "spawn" else method, force=force)


_iter_modules = pkgutil.iter_modules
pkgutil.iter_modules = _list_served
_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = _fork_workers
_load_torchvision_ops().install_hook()
sys.modules["mcp"] = None  # type: ignore[assignment] # an import of it fails, which SGLang expects
sys.meta_path.insert(0, ReplacementHook(dict(REPLACEMENTS)))

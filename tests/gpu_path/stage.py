"""The GPU path of this process, on a CPU: Transformer Engine's own Python layers and optimizer, its
compiled module, its Triton kernels and flash attention replaced by plain torch, gloo in the place
of NCCL.

megavlm and megatron-core see a GPU and choose what they choose there. Tensors stay on the CPU; what
megatron-core asks of CUDA on the way is replaced as on any machine without a GPU
(`platform.emulate_cuda`). Not covered: the kernels themselves, streams, NCCL, memory.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import torch

from megavlm.parallel import platform
from tests.gpu_path import extension, permutation
from tests.support.kernels import varlen_attn

# `make setup` puts Transformer Engine's package here, out of the way of all that runs on a CPU.
PACKAGES = Path(sys.prefix) / "gpu-path"
GPU = SimpleNamespace(major=9, minor=0, multi_processor_count=132)  # what is asked of an H100
VARIABLES = {
    "NVTE_PROJECT_BUILDING": "1",  # the package alone, without its libraries
    "NVTE_TORCH_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "1",  # flex attention is not compiled
}


def install() -> None:
    """Put this process on the GPU path, before megatron-core is imported."""
    assert not platform.has_gpu(), "this machine has a GPU: run the tests as they are"
    assert "megatron.core" not in sys.modules, "megatron-core is imported already"
    os.environ.update(VARIABLES)
    extension.install()
    _load_transformer_engine()
    platform.emulate_cuda()
    _show_a_gpu()


def _load_transformer_engine() -> None:
    """Import Transformer Engine, whose `common` would look for the compiled module's file."""
    if not importlib.util.find_spec("transformer_engine"):
        sys.path.append(str(PACKAGES))
    package = importlib.util.find_spec("transformer_engine")
    assert package is not None, f"run make setup: Transformer Engine is not in {PACKAGES}"
    name = "transformer_engine.common"
    spec = PathFinder.find_spec(name, package.submodule_search_locations)
    assert spec is not None and spec.loader is not None
    common = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch

    transformer_engine.common = common
    _replace_triton()


def _replace_triton() -> None:
    """Put `permutation` in the place of the functions that launch Triton's kernels."""
    from transformer_engine.pytorch.triton import permutation as launchers

    for name in vars(permutation):
        if hasattr(launchers, name) and name.endswith("_map"):
            setattr(launchers, name, getattr(permutation, name))


def _show_a_gpu() -> None:
    """Answer what is asked about the GPU; the platform's device and backend remain the CPU's."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device=None: GPU
    torch.cuda.get_device_capability = lambda device=None: (GPU.major, GPU.minor)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = property(lambda tensor: True)
    platform.device = lambda: torch.device("cpu")
    platform.backend = lambda: "gloo"
    platform.free_cached_memory = lambda: None
    from torch.nn.attention import varlen

    varlen.varlen_attn = varlen_attn
    # The other of flash-linear-attention, which transformers would use too if it were importable.
    from megavlm.models.linear_attention import chunked_rule, gated_delta_net

    gated_delta_net.choose_rule = lambda: chunked_rule.chunk_gated_delta_rule

"""Device of the process: a GPU with NCCL, or a CPU with gloo. The only module that uses torch.cuda.

megatron-core 0.16.1 assumes CUDA and Transformer Engine. `install` makes its training path run on a
CPU, and on a GPU without Transformer Engine; it is called once, before the first `import megatron`,
and does nothing where both are there. It replaces calls for synchronization, allocation and random
states on a CPU, and Transformer Engine's optimizer and norm where that is missing. It does not
replace model code or communication.
"""

import contextlib
import importlib.util
import logging
import os
import resource
import sys
import warnings
from typing import Any

import torch
from torch.optim.adam import adam

# Defaults for the environment of every rank and of the servers that it starts.
ENVIRONMENT = {
    # Sequence parallelism relies on one hardware queue for the order of communication and compute.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # As SGLang sets them: a group of trainer and servers hangs or fails if they differ between its
    # ranks.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


# Part of a GPU's name -> its dense bf16 FLOPs per second. Longer names come first.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def has_gpu() -> bool:
    return torch.cuda.is_available()


def is_hopper() -> bool:
    return has_gpu() and torch.cuda.get_device_capability()[0] == 9


def has_transformer_engine() -> bool:
    """Return True if layers and optimizer are Transformer Engine's: on a GPU, where it is
    installed.
    """
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def num_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if has_gpu() else 0


def peak_flops() -> float | None:
    """Return the dense bf16 FLOPs per second of this rank's GPU according to its data sheet. None
    without a GPU, or for a GPU that is not in PEAK_FLOPS.
    """
    if not has_gpu():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def device() -> torch.device:
    """Return the device of this rank: the GPU that `start` selected, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def backend() -> str:
    return "nccl" if has_gpu() else "gloo"


def start(local_rank: int) -> None:
    """Select this rank's device. A CPU rank uses one thread, since ranks share the cores."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if has_gpu():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)


def join(device: torch.device) -> None:
    """Make the calling thread use `device`, the device of the thread that started it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_uuid(index: int) -> str:
    """Return the UUID of a GPU. It identifies the GPU in processes that number GPUs differently."""
    return str(torch.cuda.get_device_properties(index).uuid)


def synchronize() -> None:
    """Block until the device's queued work is done."""
    if has_gpu():
        torch.cuda.synchronize()


def free_cached_memory() -> None:
    """Return cached memory to the device for other processes, including memory that other processes
    read by CUDA IPC handles and have released.
    """
    if has_gpu():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def peak_memory_bytes() -> int:
    """Return this process's peak memory in bytes: allocated on the GPU, or resident on a CPU."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Done:
    """Stand-in for a CUDA stream or event. On a CPU all queued work is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class Adam(torch.optim.Optimizer):
    """Adam with the arguments and the state layout of Transformer Engine's FusedAdam (`step` in the
    group). On a GPU all parameters of a group are updated by one kernel per block of tensors, and
    the host reads none of them.

    megatron-core's distributed optimizer saves and loads that layout; torch's own Adam cannot be
    loaded back.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": True,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            # torch's function counts a step itself, in a tensor beside each parameter.
            steps = torch.full((len(params),), float(group.get("step", 0)), device=params[0].device)
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p].update(
                        exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
            states = [self.state[p] for p in params]
            adam(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [*steps.unbind()],
                # On a CPU the fused kernel rounds the last elements of a tensor differently, so
                # that updates would depend on how a parameter is cut over ranks.
                fused=has_gpu(),
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _norm(chunk_size: int, flag: Any, lists: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Return the norm [1] of all tensors of one list, as Transformer Engine's function does."""
    (tensors,) = lists
    return torch.nn.utils.get_total_norm(tensors, foreach=True).view(1), None


def _scale(chunk_size: int, flag: Any, lists: Any, factor: float) -> None:
    """Multiply tensors in place by a factor, as Transformer Engine's function does with two equal
    lists.
    """
    torch._foreach_mul_(lists[1], factor)


def install() -> None:
    """Make megatron-core run on a CPU, or on a GPU without Transformer Engine. Idempotent."""
    if has_transformer_engine() or torch.cuda.synchronize is _nothing:
        return
    # Its modules warn that Transformer Engine and Apex are missing, which are not needed.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)", module="megatron")
    if has_gpu():
        _replace_transformer_engine()
        return
    # megatron-core binds torch's factories as defaults when it is imported.
    assert "megatron.core" not in sys.modules, "install the platform before importing megatron"
    # megatron-core calls functions that torch renamed; users cannot change that.
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated")
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    emulate_cuda()
    _replace_transformer_engine()


def emulate_cuda() -> None:
    """Replace the CUDA calls in megatron-core's training path. This is `install` without the part
    for Transformer Engine.
    """
    _replace_waiting()
    _replace_allocation()
    _replace_compiler()
    _replace_random_states()
    _replace_sizes()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _replace_waiting() -> None:
    torch.cuda.synchronize = _nothing
    torch.cuda.Stream = torch.cuda.Event = _Done  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = _Done  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]


def _replace_allocation() -> None:
    with torch.device("cpu"):
        # `with torch.device(...)` lists the factories that it applies to at its first use. They
        # must be the original ones, so it is used here before they are replaced.
        torch.empty(0)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    for name in (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "empty_like",
        "arange",
    ):  # megatron writes device="cuda" in these
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    plain_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron's optimizers compare parameter.type() with "torch.cuda.FloatTensor"
        answer = plain_type(self, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.")

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _on_cpu(factory: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _replace_compiler() -> None:
    """Leave megatron-core's fused functions uncompiled. Compiling them with C++ takes 15 s in the
    first step, and loading the compiler takes 2 s at the start of each rank.
    """
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    import megatron.core.jit  # noqa: F401  # binds it

    torch.compile = compiler


def _replace_random_states() -> None:
    """Replace CUDA's random generator by the CPU's."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.get_rng_state = random._get_cuda_rng_state
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(
        logging.ERROR
    )  # "CPU RNG state changed", which is intended


def _replace_sizes() -> None:
    """Make the token dispatcher convert sizes to numpy; megatron-core does so on a GPU only."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _sizes


def _sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _replace_transformer_engine() -> None:
    """Replace Transformer Engine's optimizer by `Adam` and its norm and scaling of many tensors,
    and define a name that megatron-core reads.

    megatron-core's own norm and scaling take each tensor by itself, and read its norm on the host.
    """
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.transformer.moe import moe_utils

    optimizer.Adam = distrib_optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale
    moe_utils.te_general_gemm = None

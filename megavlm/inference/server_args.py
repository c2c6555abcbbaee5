"""What SGLang servers are started with: arguments and environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config

HERE = Path(__file__).resolve().parent
# Set by megavlm itself, or unsafe: they run code that comes with a model or with a request.
RESERVED = frozenset(
    "model_path host port device dtype tp_size tensor_parallel_size api_key admin_api_key config "
    "trust_remote_code enable_custom_logit_processor".split()
)

ServerArgs = Mapping[str, str | int | float | bool | list[str] | None]

# Measured on two cores: one thread, and sleeping when idle, are ten times faster than the defaults.
CPU_ARGS: ServerArgs = {
    "attention_backend": "torch_native",
    # max_total_tokens bounds the pool. This is how much memory other processes may take while the
    # server starts before it gives up.
    "mem_fraction_static": 0.6,
    "max_total_tokens": 20000,
    "sleep_on_idle": True,
    "skip_server_warmup": True,
}


def recipe_args(config: Config, device: str) -> dict[str, Any]:
    """SGLang's further arguments: what the recipe says over what serving adapters needs, and what
    its way of pausing must have.
    """
    must = {"disable_radix_cache": True} if config.rollout.pause == "in_place" else {}
    if config.rollout.lora == "merged":
        return {**config.rollout.server_args, **must}
    modules = [leaf for target in config.lora.targets for leaf in _ADAPTED_MODULES[target]]
    needed: dict[str, Any] = {"enable_lora": True, "max_lora_rank": config.lora.rank}
    if device == "cpu":
        needed["lora_backend"] = "torch_native"
    return {**needed, "lora_target_modules": modules, **config.rollout.server_args, **must}


_ADAPTED_MODULES = {
    "language.attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "language.mlp": ("gate_proj", "up_proj", "down_proj"),
}


def serving_args(
    model_folder: str | Path,
    dtype: str,
    device: str,
    tensor_parallel: int,
    server_args: ServerArgs,
) -> ServerArgs:
    """Of a server anywhere; only addresses and GPUs are left out. ValueError for arguments that are
    not allowed.
    """
    for name in server_args:
        if name.lstrip("-").replace("-", "_") in RESERVED:
            raise ValueError(
                f"rollout.server_args.{name} is not allowed: megavlm sets it itself or it lets "
                "a model or a request run code; remove it."
            )
    return {
        "model_path": str(model_folder),
        "device": device,
        "dtype": dtype,
        "tp_size": tensor_parallel,
        **(CPU_ARGS if device == "cpu" else {}),
        "log_level": "warning",
        **server_args,
    }


def arguments(values: ServerArgs) -> list[str]:
    """SGLang's command line: a flag for True, nothing for False and None."""
    words: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            listed = value if isinstance(value, list | tuple) else [value]
            words += [] if value is True else [str(item) for item in listed]
    return words


def image_variables(cache_images: bool) -> dict[str, str]:
    """SGLang never drops the features of images that it keeps when weights change."""
    return {} if cache_images else {"SGLANG_VLM_CACHE_SIZE_MB": "0"}


def environment(
    device: str, tensor_parallel: int, cache_images: bool, first_core: int = 0
) -> dict[str, str]:
    """This process's environment without what torchrun put there, and with SGLang's settings."""
    torchrun = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC")
    variables = {name: value for name, value in os.environ.items() if not _any_in(torchrun, name)}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables |= image_variables(cache_images)
    if device == "cpu":
        paths = [str(HERE / "cpu_support"), *filter(None, [os.environ.get("PYTHONPATH")])]
        cores = sorted(os.sched_getaffinity(0))
        variables |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles C++ for 20 s
            "CUDA_VISIBLE_DEVICES": "",
        }
        if tensor_parallel > 1:  # the cores of each rank
            ranks = range(first_core, first_core + tensor_parallel)
            bound = (str(cores[rank % len(cores)]) for rank in ranks)
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return variables


def _any_in(words: tuple[str, ...], name: str) -> bool:
    return any(word in name for word in words)

"""SGLang on a machine without a GPU: arguments and environment of its processes. The other files of
this folder run inside them, because it is on their path (sitecustomize.py).
"""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Measured on two cores: one thread and sleeping when idle are ten times as fast as the defaults.
ARGS: dict[str, str | int | float | bool] = {
    "attention_backend": "torch_native",
    # The KV cache is sized by max_total_tokens. This fraction only decides how much memory other
    # processes, such as ranks that load their model, may take before a starting server gives up.
    "mem_fraction_static": 0.6,
    "max_total_tokens": 20000,
    "sleep_on_idle": True,
    "skip_server_warmup": True,
    # On a busy machine a forward of large images may take longer than SGLang's default of 300 s.
    # Our own probes detect a server that hangs.
    "watchdog_timeout": 86400,
}
# For a model with Gated DeltaNet: its recurrent states have a separate pool.
LINEAR_ARGS: dict[str, str | int | float | bool] = {
    "disable_overlap_schedule": True,  # SGLang does not support overlap for it on a CPU
    "max_mamba_cache_size": 200,  # the default takes gigabytes for a tiny model
}


def variables(served_modules: str, tensor_parallel: int, first_core: int) -> dict[str, str]:
    """Return the environment variables of a server on a CPU.

    served_modules: Part of the names of SGLang's modules that serve the model. first_core: The
    ranks of a tensor-parallel server are bound to cores from this one on, one core each.
    """
    found = {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "MEGAVLM_SERVED_MODULES": served_modules,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if tensor_parallel > 1:
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(first_core, first_core + tensor_parallel)
        bound = (str(cores[rank % len(cores)]) for rank in ranks)
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return found

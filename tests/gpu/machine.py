"""What the machine is: versions, and the rates that other figures are measured against.

python -m tests.gpu.machine
"""

import importlib.metadata
import os
import platform as host
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megavlm.parallel import platform
from tests.gpu import model, shapes
from tests.gpu.lines import checking, report

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "sglang-kernel",
    "transformers",
    "fla-core",
)


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def card() -> str:
    """Return the GPU's name and driver, or say that there is none."""
    if not platform.has_gpu():
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]


def seconds_of(work: Callable[[], object], repeats: int = 10) -> float:
    """Return the mean seconds of `work` after a first run."""
    work()
    platform.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    platform.synchronize()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    model.prepare()
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0  # noqa: S108
    memory = torch.cuda.get_device_properties(0).total_memory if platform.has_gpu() else 0
    report(
        "machine",
        card=card(),
        cuda=torch.version.cuda,
        cores=os.cpu_count(),
        processor=host.machine(),
        python=host.python_version(),
        gpu_gb=memory / 1e9,
        shm_gb=shm / 1e9,
        nvcc=shutil.which("nvcc"),
        versions=versions(),
    )
    side, copied = (256, 2**20) if shapes.is_tiny() else (8192, 2**30)
    device = platform.device()
    with checking("bf16 matrix product"):
        # Random data: zeros draw less power, and run faster.
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        report("bf16 matrix product", tflops=2 * side**3 / seconds_of(lambda: a @ b) / 1e12)
    with checking("copies"):
        source = torch.empty(copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        pinned = torch.empty(copied, dtype=torch.uint8, pin_memory=platform.has_gpu())
        rates = {
            "on_device": 2 * copied / seconds_of(lambda: target.copy_(source)),
            "to_device": copied / seconds_of(lambda: target.copy_(pinned, non_blocking=True)),
            "to_host": copied / seconds_of(lambda: pinned.copy_(target, non_blocking=True)),
        }
        report("copies, GB/s", **{name: rate / 1e9 for name, rate in rates.items()})


if __name__ == "__main__":
    main()

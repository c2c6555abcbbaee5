"""The tests' parts: each a process of its own with its part of nine minutes, and what must hold."""

import importlib.metadata
import json
import os
import platform as machine
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megavlm.parallel import platform
from tests.gpu import grpo, report, shapes

# Seconds at most, of one 80 GB GPU: together nine minutes.
LIMITS = {"parity": 85, "grpo": 60, "run": 160, "figures": 55, "linear_attention": 40}
SPREAD = 1.25  # of transformers' own error in bf16
# Of a kernel in bf16, relative to what is exact. A state or a gradient that is lost makes 0.2.
KERNEL_ERROR = 0.02
GROWTH = 0.02  # of memory, between two steps that should need the same
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")


def part(name: str, *arguments: str) -> Any:
    """Return what a module of this folder prints about a family; RuntimeError if it fails."""
    command = [sys.executable, "-m", f"tests.gpu.{name}", *arguments]
    limit = LIMITS[name] * (4 if shapes.is_tiny() else 1)  # a CPU may be busy
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def parity_faults(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the backends that are further from fp32 than transformers in bf16 allows."""
    theirs, faults = found["transformers"], []
    allowed = SPREAD * theirs["logprobs"]
    drift = max(0.02, 2 * abs(theirs["gradient"] - 1))
    for name, ours in found.items():
        if not ours["logprobs"] <= allowed:
            faults.append(f"{name}: log-probs are off by {ours['logprobs']:.2e} of {allowed:.2e}")
        if not abs(ours["gradient"] - 1) <= drift:
            faults.append(f"{name}: the gradient's norm is {ours['gradient']:.3f} times")
    return faults


def kernel_faults(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the tensors of linear attention's kernel that are too far from the exact ones."""
    return [
        f"{name}: off by {error:.1e}, rounding alone by {found['rounding'][name]:.1e}"
        for name, error in found["kernel"].items()
        if not error <= KERNEL_ERROR
    ]


def grpo_faults(steps: list[dict[str, Any]], memory: grpo.Memory, total: int) -> list[str]:
    """Return what is wrong with a run on one GPU of `total` bytes, without a GPU 0."""
    faults = []
    for step in steps:
        if not step["sync_checked"]:
            faults.append(f"step {step['step']}: no checksum was compared")
        if step["skipped_updates"]:
            faults.append(f"step {step['step']}: an update was skipped")
    if total:
        found = memory.by_step()
        low, high = grpo.drift(found, 4, steps[-1]["step"])
        if max(low, high) > GROWTH * total:
            faults.append(f"memory grew by {low / 1e9:.1f} (least) and {high / 1e9:.1f} GB (most)")
        least, most = found[steps[-1]["step"]]
        if most - least < GROWTH * total:
            faults.append("nothing was released between the phases")
    return faults


def about() -> dict[str, Any]:
    """Return the machine, versions, command and date for the page."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    gpus = "no GPU"
    if platform.has_gpu():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    switch = f"{shapes.SWITCH}=tiny " if shapes.is_tiny() else ""
    return {
        "machine": f"One {gpus}, {os.cpu_count()} cores of {machine.machine()}",
        "versions": versions,
        "command": f"{switch}make gpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def write(results: Mapping[str, Any], path: Path | None = None) -> None:
    """Write the page: GPU.md, or to `path`."""
    (path or report.PATH).write_text(report.render({**about(), **results}), encoding="utf-8")

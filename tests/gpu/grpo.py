"""A GRPO run on one GPU that trainer and server share, and what must hold of its memory.

python -m tests.gpu.grpo [fp8]

Weights go to the server by CUDA IPC, verified by checksums; each step takes the GPU's memory from
one to the other and back. With `fp8` the server's weights are quantised, and a few steps show how
far its log-probs are from the trainer's.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megavlm.demo.shapes import write_dataset
from megavlm.observability.metrics import METRICS_FILE
from megavlm.observability.records import read_records
from megavlm.parallel import platform
from tests.gpu import folder as folders
from tests.gpu import model, shapes
from tests.gpu.lines import checking, report
from tests.gpu.serving import KIT_ARGS, NOT_YET

RELEASE = "Qwen3-VL-2B"
STEPS = 20
LIMIT = 330  # seconds
GROWTH = 0.02  # of the GPU's memory, between two steps that should need the same
FP8_STEPS, FP8_LIMIT = 4, 150
FP8_KL = 0.05  # nats a token, between the server and the trainer, whose weights are not rounded
# Whole blocks of 128, unlike those of the other tiny models.
FP8_TINY = {"head_dim": 128, "hidden_size": 128, "ffn_size": 256, "vision_ffn_size": 256}


def prepare(folder: Path, *, fp8: bool = False) -> Path:
    """Write a model with random weights, drawn images and a recipe. Returns the recipe's path."""
    folders.make_folder(folder / "model", RELEASE, **(FP8_TINY if fp8 else {}))
    platform.free_cached_memory()
    write_dataset(folder / "data", seed=0, num_train=64, num_test=4)
    path = folder / "recipe.yaml"
    values = recipe(folder, is_tiny=shapes.is_tiny())
    if fp8:
        values["model"]["dtype"] = "bfloat16"
        values["algorithm"]["steps"] = steps_of(fp8=True)
        values["rollout"]["quantization"] = "fp8"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def steps_of(*, fp8: bool) -> int:
    """Return the steps of the run."""
    if shapes.is_tiny():
        return 3
    return FP8_STEPS if fp8 else STEPS


def recipe(folder: Path, *, is_tiny: bool) -> dict[str, Any]:
    """Return the run's recipe, on one GPU or on a CPU."""
    server = {
        **KIT_ARGS,
        **NOT_YET,
        "mem_fraction_static": 0.5,
        "cuda_graph_max_bs_decode": 128,
        "skip_server_warmup": True,
    }
    return {
        "run": {"dir": str(folder / "run"), "summary": False},
        "model": {"folder": str(folder / "model"), "dtype": "float32" if is_tiny else "bfloat16"},
        "data": {
            "train_files": [str(folder / "data/train.parquet")],
            "max_prompt_tokens": 128,
            "pack_tokens": 4096,
        },
        "algorithm": {
            "name": "grpo",
            "steps": 3 if is_tiny else STEPS,
            "prompts_per_step": 4 if is_tiny else 16,
            "responses_per_prompt": 2 if is_tiny else 8,
            "kl_coefficient": 0.01,
            "entropy_coefficient": 0.01,  # a gradient where no response is right
        },
        "reward": {"name": "exact_match"},
        "rollout": {
            "colocate": True,
            "sync": "tensor",
            "max_new_tokens": 8 if is_tiny else 128,
            "start_timeout": 240,
            "server_args": {} if is_tiny else server,
        },
    }


@dataclass
class Memory:
    """Samples of the GPU's used memory: (steps that are done, bytes)."""

    samples: list[tuple[int, int]] = field(default_factory=list)

    def by_step(self) -> dict[int, tuple[int, int]]:
        """Return the least and the most bytes while each step was computed."""
        steps: dict[int, list[int]] = {}
        for done, used in self.samples:
            steps.setdefault(done + 1, []).append(used)
        return {step: (min(used), max(used)) for step, used in steps.items()}


@contextmanager
def watched(metrics: Path, used: Any, every: float = 0.2) -> Any:
    """Sample `used()`, the bytes that are in use, beside a run that writes `metrics`."""
    memory, end = Memory(), threading.Event()

    def watch() -> None:
        while not end.wait(every):
            memory.samples.append((num_steps(metrics), used()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        end.set()
        thread.join()


def num_steps(metrics: Path) -> int:
    return len(read_records(metrics))


def used_bytes() -> int:
    """Return the memory in use on the first GPU, of all processes, by nvidia-smi; 0 without one."""
    if not platform.has_gpu():
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    reply = subprocess.run(query, capture_output=True, text=True)
    first = reply.stdout.splitlines()[0] if reply.stdout else "0"
    return int(first) * 2**20


def run(path: Path, timeout: float) -> tuple[list[dict[str, Any]], Memory]:
    """Run a recipe. Returns its metrics by step and its memory; RuntimeError if it fails."""
    metrics = Path(json.loads(path.read_text())["run"]["dir"]) / METRICS_FILE
    with watched(metrics, used_bytes) as memory:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.one_rank", "train", str(path)],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        seconds = time.monotonic() - started
        logs = [x.read_text()[-3000:] for x in metrics.parent.glob("rollout_server*.log")]
        raise RuntimeError("\n".join((f"{seconds:.0f} s", *logs, done.stdout, done.stderr)))
    return read_records(metrics), memory


def faults_of(steps: Sequence[Mapping[str, Any]], memory: Memory, total: int) -> list[str]:
    """Return what is wrong with a run on one GPU of `total` bytes; 0 without a GPU."""
    faults = []
    for step in steps:
        if not step["sync_checked"]:
            faults.append(f"step {step['step']}: no checksum was compared")
        if step["skipped_updates"]:
            faults.append(f"step {step['step']}: an update was skipped")
    if total:
        found = memory.by_step()
        low, high = drift(found, 4, steps[-1]["step"])
        if max(low, high) > GROWTH * total:
            faults.append(f"memory grew by {low / 1e9:.1f} (least) and {high / 1e9:.1f} GB (most)")
        least, most = found[steps[-1]["step"]]
        if most - least < GROWTH * total:
            faults.append("nothing was released between the phases")
    return faults


def drift(memory: Mapping[int, tuple[int, int]], first: int, last: int) -> tuple[int, int]:
    """Return by how much the least and the most memory of a step have grown between two steps."""
    (low, high), (later_low, later_high) = memory[first], memory[last]
    return later_low - low, later_high - high


def summary(steps: Sequence[Mapping[str, Any]], memory: Memory) -> dict[str, Any]:
    """Return medians over the steps after the first two, for the report. `seconds` has the phase
    "switch", in which the GPU changes hands.
    """
    settled = sorted(steps, key=lambda step: step["step"])[2:] or steps

    def median(name: str) -> float:
        values = sorted(float(step[name]) for step in settled if step.get(name) is not None)
        return values[len(values) // 2]

    names = sorted({name for step in settled for name in step if name.startswith("seconds/")})
    return {
        "sync_gb_per_second": median("sync_bytes") / median("sync_seconds") / 1e9,
        "sync_seconds": median("sync_seconds"),
        "seconds": {name.removeprefix("seconds/"): median(name) for name in names},
        "sync_bytes": median("sync_bytes"),
        "sync_tensors": median("sync_tensors"),
        "sync_checked": median("sync_checked"),
        "tokens_per_second": median("tokens_per_second"),
        "trainer_gib": median("memory_gib"),
        "rollout_max_difference": max(float(step["rollout_max_difference"]) for step in settled),
        "rollout_train_kl": median("rollout_train_kl"),
        "memory": {str(step): list(bounds) for step, bounds in memory.by_step().items()},
    }


def main() -> None:
    fp8 = sys.argv[1:] == ["fp8"]
    model.prepare()
    with tempfile.TemporaryDirectory() as name, checking("run"):
        limit = FP8_LIMIT if fp8 and not shapes.is_tiny() else LIMIT
        steps, memory = run(prepare(Path(name), fp8=fp8), limit)
        total = torch.cuda.get_device_properties(0).total_memory if platform.has_gpu() else 0
        faults = faults_of(steps, memory, 0 if fp8 else total)  # a few steps show no drift
        if fp8:
            faults += [
                f"step {step['step']}: the server is {step['rollout_train_kl']:.2f} nats off"
                for step in steps
                if not step["rollout_train_kl"] <= FP8_KL
            ]
        if len(steps) != steps_of(fp8=fp8):
            faults.append(f"{len(steps)} steps of {steps_of(fp8=fp8)}")
        report("run", fault="; ".join(faults) or None, steps=len(steps), **summary(steps, memory))


if __name__ == "__main__":
    main()

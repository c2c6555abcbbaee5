"""GRPO runs on one GPU that trainer and server share, and what must hold of their memory.

    python -m tests.gpu.grpo first|rest|fp8|long

Weights go to the server by CUDA IPC, verified by checksums; each step takes the GPU's memory from
one to the other and back. Each step is a line as soon as it is done.

first: Five steps, so that there is a result early.
rest: Twenty steps, after which memory must be where it was.
fp8: The server's weights are quantised, and a few steps show how far its log-probs are from the
    trainer's.
long: An eighth of the step of github.com/redai-studio/Relax/issues/117 (Qwen3-VL-4B on 8 H200: 64
    prompts x 8 responses of at most 8,192 tokens): 8 prompts x 8, each with an image of 1,024
    tokens. The mean response there is not published; here it is LONG_MEAN. Lengths are drawn, and
    no response ends early.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megavlm.demo.shapes import ROW_SCHEMA, write_dataset
from megavlm.observability.metrics import METRICS_FILE
from megavlm.observability.records import read_records
from megavlm.parallel import platform
from megavlm.planner.work import StepWork
from tests.gpu import figures, model, shapes
from tests.gpu import folder as folders
from tests.gpu.lines import checking, report
from tests.gpu.serving import KIT_ARGS, NOT_YET
from tests.gpu.stage import CPU_FACTOR, GRPO_LIMITS, LONG_LIMIT
from tests.support.random_images import image

GROWTH = 0.02  # of the GPU's memory, between two steps that should need the same
FP8_KL = 0.05  # nats a token, between the server and the trainer, whose weights are not rounded
# Whole blocks of 128, unlike those of the other tiny models.
FP8_TINY = {"head_dim": 128, "hidden_size": 128, "ffn_size": 256, "vision_ffn_size": 256}
MARGIN = 15  # seconds of a part besides its run: imports, the model's folder
LONG_TOKENS, LONG_MEAN, LONG_IMAGE = 8192, 2048, 1024


@dataclass(frozen=True)
class Case:
    """A run. steps: Its steps, fewer on a CPU. prompts, responses, tokens: Of a step on a GPU.
    settles: Whether it is long enough to compare its memory at two steps.
    """

    release: str
    steps: int
    limit: float
    prompts: int = 16
    responses: int = 8
    tokens: int = 128
    settles: bool = False

    @property
    def num_steps(self) -> int:
        return min(self.steps, 3) if shapes.is_tiny() else self.steps


CASES = {
    "first": Case("Qwen3-VL-2B", 5, GRPO_LIMITS["first"] - MARGIN),
    "rest": Case("Qwen3-VL-2B", 20, GRPO_LIMITS["rest"] - MARGIN, settles=True),
    "fp8": Case("Qwen3-VL-2B", 4, GRPO_LIMITS["fp8"] - MARGIN),
    "long": Case("Qwen3-VL-4B", 3, LONG_LIMIT - MARGIN, prompts=8, tokens=LONG_TOKENS),
}


def prepare(folder: Path, name: str) -> Path:
    """Write a model with random weights, drawn images and a recipe. Returns the recipe's path."""
    case = CASES[name]
    layers = num_layers(case.release) if name == "long" else None
    folders.make_folder(
        folder / "model", case.release, layers, **(FP8_TINY if name == "fp8" else {})
    )
    platform.free_cached_memory()
    if name == "long":
        write_images(folder / "data", case.prompts)
    else:
        write_dataset(folder / "data", seed=0, num_train=64, num_test=4)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe(folder, name)))  # JSON is YAML
    return path


def num_layers(release: str) -> int | None:
    """Return the layers that fit on the GPU with their optimizer; None on a CPU takes all."""
    if not platform.has_gpu():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return figures.num_layers(shapes.config_of(release), total)


def write_images(folder: Path, count: int) -> None:
    """Write rows with an image each that becomes LONG_IMAGE tokens of Qwen3-VL: 32 x 32 pixels for
    a token. On a CPU images have four tokens.
    """
    side = 64 if shapes.is_tiny() else 32 * int(LONG_IMAGE**0.5)
    rows = [
        {
            "images": [{"bytes": image(side, side, i), "path": None}],
            "problem": "<image>How many circles are there?",
            "answer": "1",
            "task": "count",
        }
        for i in range(count)
    ]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA), folder / "train.parquet")


def recipe(folder: Path, name: str) -> dict[str, Any]:
    """Return the recipe of a run on one GPU, or on a CPU."""
    case, is_tiny = CASES[name], shapes.is_tiny()
    server = {
        **KIT_ARGS,
        **NOT_YET,
        "mem_fraction_static": 0.5,
        "cuda_graph_max_bs_decode": 128,
        "skip_server_warmup": True,
    }
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "summary": False},
        "model": {"folder": str(folder / "model"), "dtype": "float32" if is_tiny else "bfloat16"},
        "data": {
            "train_files": [str(folder / "data/train.parquet")],
            "max_prompt_tokens": 128,
            "pack_tokens": 4096,
        },
        "algorithm": {
            "name": "grpo",
            "steps": case.num_steps,
            "prompts_per_step": 4 if is_tiny else case.prompts,
            "responses_per_prompt": 2 if is_tiny else case.responses,
            "kl_coefficient": 0.01,
            "entropy_coefficient": 0.01,  # a gradient where no response is right
        },
        "reward": {"name": "exact_match"},
        "rollout": {
            "colocate": True,
            "sync": "tensor",
            "max_new_tokens": 8 if is_tiny else case.tokens,
            "start_timeout": 240,
            "server_args": {} if is_tiny else server,
        },
    }
    if name == "fp8":
        values["model"]["dtype"] = "bfloat16"
        values["rollout"]["quantization"] = "fp8"
    if name == "long" and not is_tiny:
        # A pack holds a prompt with its longest response and no more, because activations of
        # megatron-core's own layers take 2.3 MB a token.
        prompt = 1280
        values["data"] |= {"max_prompt_tokens": prompt, "pack_tokens": prompt + LONG_TOKENS}
        values["recompute"] = {"language": "selective", "modules": ["mlp"]}
        values["rollout"]["request_timeout"] = 400
    return values


def lengths(case: Case) -> list[int]:
    """Return the tokens of a step's responses: quantiles of a skewed distribution, so that each
    step has the same, up to the longest.
    """
    if shapes.is_tiny():
        return StepWork(4, 2, 1, 4, 8, 1).lengths(8)
    count = case.prompts * case.responses
    return StepWork(case.prompts, case.responses, 1, LONG_MEAN, LONG_TOKENS, 1).lengths(count)


def fix_lengths(drawn: Sequence[int]) -> None:
    """Have requests of this process ask for one response of each length, in turn, which does not
    end early.
    """
    from megavlm.inference import bodies, protocol, requests

    count, parameters = itertools.cycle(drawn), bodies._parameters
    none = protocol.Response(np.zeros(0, np.int32), np.zeros(0, np.float32), protocol.ABORT, "")

    def fixed(sampling_params: Any, most: int) -> dict[str, Any]:
        return parameters(sampling_params, min(most, next(count))) | {"ignore_eos": True}

    def body(
        prompts: Any, n: int, sampling_params: Any, encoder: Any, first_routed: int = 0
    ) -> Any:
        (prompt,) = prompts
        return bodies.continue_body(prompt, [none] * n, sampling_params, encoder)

    bodies._parameters = fixed
    requests.generate_body = body
    requests.TOKENS_PER_REQUEST = 0  # each prompt has a request of its own


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
def watched(
    metrics: Path,
    used: Callable[[], int],
    show: Callable[[Mapping[str, Any]], None] = lambda step: None,
    every: float = 0.2,
) -> Any:
    """Sample `used()`, the bytes that are in use, beside a run that writes `metrics`, and `show`
    each step when it is done.
    """
    memory, end = Memory(), threading.Event()

    def watch() -> None:
        shown = 0
        while True:
            is_last = end.wait(every)
            steps = read_records(metrics)
            memory.samples.append((len(steps), used()))
            for step in steps[shown:]:
                show(step)
            shown = len(steps)
            if is_last:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        end.set()
        thread.join()


def used_bytes() -> int:
    """Return the memory in use on the first GPU, of all processes, by nvidia-smi; 0 without one."""
    if not platform.has_gpu():
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    reply = subprocess.run(query, capture_output=True, text=True)
    first = reply.stdout.splitlines()[0] if reply.stdout else "0"
    return int(first) * 2**20


def run(path: Path, case: Case, *options: str) -> tuple[list[dict[str, Any]], Memory, str | None]:
    """Run a recipe, and report each step. Returns the metrics of the steps that were done, the
    memory, and a sentence if it did not end well. Its output and its servers' logs go to stderr.
    """
    folder = Path(json.loads(path.read_text())["run"]["dir"])
    limit = case.limit * (CPU_FACTOR if shapes.is_tiny() else 1)
    started, fault = time.monotonic(), None
    command = [sys.executable, "-m", "tests.gpu.one_rank", *options, "train", str(path)]
    try:
        with watched(folder / METRICS_FILE, used_bytes, report_step) as memory:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if done.returncode:
            fault = f"{done.stdout[-1000:]}{done.stderr}"
            fault = f"failed after {time.monotonic() - started:.0f} s: {fault}"
    except subprocess.TimeoutExpired as error:
        fault = f"stopped after {limit:.0f} s: {(error.stdout or b'').decode()[-500:]}"
    finally:
        for log in sorted(folder.glob("*.log")):
            print(f"===== {log.name}", log.read_text(errors="replace"), sep="\n", file=sys.stderr)
    return read_records(folder / METRICS_FILE), memory, fault


def report_step(step: Mapping[str, Any]) -> None:
    seconds = {k.removeprefix("seconds/"): v for k, v in step.items() if k.startswith("seconds/")}
    names = ("step", "mfu", "sync_seconds", "sync_checked", "memory_gib", "rollout_train_kl")
    report("step", **{name: step.get(name) for name in names}, seconds=seconds)


def faults_of(
    steps: Sequence[Mapping[str, Any]], memory: Memory, total: int, case: Case
) -> list[str]:
    """Return what is wrong with a run on one GPU of `total` bytes; 0 without a GPU."""
    faults = []
    for step in steps:
        if not step["sync_checked"]:
            faults.append(f"step {step['step']}: no checksum was compared")
        if step["skipped_updates"]:
            faults.append(f"step {step['step']}: an update was skipped")
    if len(steps) != case.num_steps:
        faults.append(f"{len(steps)} steps of {case.num_steps}")
    elif total and case.settles:
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
        "mfu": median("mfu") if settled[0].get("mfu") is not None else None,
        "trainer_gib": median("memory_gib"),
        "rollout_max_difference": max(float(step["rollout_max_difference"]) for step in settled),
        "rollout_train_kl": median("rollout_train_kl"),
        "memory": {str(step): list(bounds) for step, bounds in memory.by_step().items()},
    }


def main() -> None:
    (name,) = sys.argv[1:]
    case = CASES[name]
    model.prepare()
    with tempfile.TemporaryDirectory() as folder, checking("run"):
        path = prepare(Path(folder), name)
        options = ["--lengths", json.dumps(lengths(case))] if name == "long" else []
        steps, memory, fault = run(path, case, *options)
        total = torch.cuda.get_device_properties(0).total_memory if platform.has_gpu() else 0
        faults = [fault] if fault else []
        faults += faults_of(steps, memory, total, case)
        if name == "fp8":
            faults += [
                f"step {step['step']}: the server is {step['rollout_train_kl']:.2f} nats off"
                for step in steps
                if not step["rollout_train_kl"] <= FP8_KL
            ]
        values = summary(steps, memory) if steps else {}
        report("run", fault="; ".join(faults) or None, steps=len(steps), **values)


if __name__ == "__main__":
    main()

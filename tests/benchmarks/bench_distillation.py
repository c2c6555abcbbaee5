"""`python -m tests.benchmarks.bench_distillation DEMO`: prints the greedy accuracy of students
after a few steps of GRPO alone, of a teacher alone, and of both, on a CPU, for some seeds.

DEMO is the folder of a finished `make demo`. Its final model is the teacher, behind a server of its
own; students begin at its warm start, where the teacher began.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs
from megavlm.config.algorithm import GRPO
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.teacher import API_KEY
from megavlm.observability.result import RESULT_FILE

RECIPE = Path(__file__).parents[2] / "recipes" / "debug" / "grpo_shapes.yaml"
HEAD = """| Seed | Teacher | Student before | GRPO alone | Teacher alone | Both |
|---|---|---|---|---|---|"""


def nothing(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Return advantages without the rewards, by which the student is only judged."""
    return torch.zeros_like(inputs.rewards)


STUDENTS = {
    "GRPO alone": ["distillation.urls=[]"],
    "teacher alone": [
        "algorithm.advantage_estimator=tests.benchmarks.bench_distillation:nothing",
        "algorithm.kl_coefficient=0",
        "algorithm.entropy_coefficient=0",
    ],
    "both": [],
}


def trained(demo: Path, folder: Path, seed: int, keys: list[str], api_key: str) -> float:
    """Train a student, and return its greedy accuracy on the demo's test questions."""
    overrides = [
        f"model.folder={demo / 'model'}",
        f"model.checkpoint={demo / 'warm_start/checkpoints'}",
        f"data.train_files=[{demo / 'data/train.parquet'}]",
        f"data.test_files=[{demo / 'data/test.parquet'}]",
        "data.category_key=task",
        f"run.dir={folder}",
        f"run.seed={seed}",
        "run.summary=false",
        "evaluation={before: false, after: true, sampled: false, shuffled: false}",
        "checkpoint={export_hf: false, verify_export: false}",
        *keys,
    ]
    words = [sys.executable, "-m", "megavlm", "train", str(RECIPE), *overrides]
    environment = os.environ | {API_KEY: api_key, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    return float(json.loads((folder / RESULT_FILE).read_text())["accuracy_after"])


def row(demo: Path, seed: int, common: list[str], api_key: str) -> str:
    made = json.loads((demo / RESULT_FILE).read_text())
    accuracies = [made["accuracy_after"], made["accuracy_before"]]
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in STUDENTS.items():
            run_dir = Path(folder, name.replace(" ", "_"))
            share = trained(demo, run_dir, seed, [*common, *keys], api_key)
            accuracies.append(share)
            print(f"seed {seed}, {name}: {share:.1%}", flush=True)
    return f"| {seed} | {' | '.join(f'{100 * share:.1f} %' for share in accuracies)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    demo = options.demo.resolve()
    with tempfile.NamedTemporaryFile() as log:
        teacher = ServerOptions(demo / "hf", dtype="float32", device="cpu")
        with ManagedServer(teacher, log_path=log.name) as server:
            common = [f"algorithm.steps={options.steps}", f"distillation.urls=['{server.url}']"]
            rows = [row(demo, seed, common, server.api_key) for seed in options.seeds]
    print("\n".join([HEAD, *rows]))


if __name__ == "__main__":
    main()

"""`python -m tests.benchmarks.bench_distillation DEMO`: prints the greedy accuracy of students
after a few steps of GRPO alone, of a teacher alone, and of both, on a CPU, for some seeds. With
`--several` it prints that of two teachers, each good at half of the questions, and of students that
learn only from them; with `--hints` that of students that are their own teacher.

DEMO is the folder of a finished `make demo`. Its final model is the teacher, behind a server of its
own; students begin at its warm start, where the teacher began. The two teachers are trained on half
of the tasks each, and stay in DEMO. Students with hints begin at a warm start that also taught to
read a hint.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs
from megavlm.config.algorithm import GRPO
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.teacher import API_KEY
from megavlm.observability.result import RESULT_FILE
from tests.support.servers import run_server

RECIPES = Path(__file__).parents[2] / "recipes" / "debug"
HEAD = """| Seed | Teacher | Student before | GRPO alone | Teacher alone | Both |
|---|---|---|---|---|---|"""
HALVES = {"colours": ("colour", "compare"), "numbers": ("count",)}
SEVERAL_HEAD = """| Seed | Teacher of colours | Teacher of numbers | Student before | Student |
|---|---|---|---|---|"""
HINT = " Answer: {answer}"
HINTS_HEAD = """| Seed | Student before | Student |
|---|---|---|"""
KEY = "bench"  # of all teachers' servers


def nothing(inputs: AdvantageInputs, settings: GRPO) -> Tensor:
    """Return advantages without the rewards, by which the student is only judged."""
    return torch.zeros_like(inputs.rewards)


ONLY_TEACHERS = [
    "algorithm.advantage_estimator=tests.benchmarks.bench_distillation:nothing",
    "algorithm.kl_coefficient=0",
    "algorithm.entropy_coefficient=0",
]
STUDENTS = {
    "GRPO alone": ["distillation.teachers={}"],
    "teacher alone": ONLY_TEACHERS,
    "both": [],
}


def train(
    demo: Path, folder: Path, keys: Sequence[str], recipe: str = "grpo_shapes.yaml", seed: int = 0
) -> None:
    overrides = [
        f"model.folder={demo / 'model'}",
        f"model.checkpoint={demo / 'warm_start/checkpoints'}",
        f"data.train_files=[{demo / 'data/train.parquet'}]",
        f"data.test_files=[{demo / 'data/test.parquet'}]",
        f"run.dir={folder}",
        f"run.seed={seed}",
        "run.summary=false",
        "evaluation={before: false, after: true, sampled: false, shuffled: false}",
        "checkpoint={export_hf: false, verify_export: false}",
        *keys,
    ]
    words = [sys.executable, "-m", "megavlm", "train", str(RECIPES / recipe), *overrides]
    environment = os.environ | {API_KEY: KEY, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)


def accuracy(folder: Path, key: str = "accuracy_after") -> float:
    """Return a run's greedy accuracy on the demo's test questions."""
    return float(json.loads((folder / RESULT_FILE).read_text())[key])


def line(seed: int, shares: Sequence[float]) -> str:
    return f"| {seed} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |"


def served(stack: ExitStack, folder: Path) -> str:
    """Start a server of a teacher, and return its URL."""
    log = stack.enter_context(tempfile.NamedTemporaryFile())
    options = ServerOptions(folder, dtype="float32", device="cpu")
    server = ManagedServer(options, log_path=log.name)
    server.api_key = KEY
    return stack.enter_context(run_server(server)).url


def one_teacher(demo: Path, seed: int, url: str, common: Sequence[str]) -> str:
    shares = [accuracy(demo), accuracy(demo, "accuracy_before")]
    keys = [*common, f"distillation.teachers.large.urls=['{url}']"]
    with tempfile.TemporaryDirectory() as folder:
        for name, further in STUDENTS.items():
            run_dir = Path(folder, name.replace(" ", "_"))
            train(demo, run_dir, [*keys, *further], seed=seed)
            shares.append(accuracy(run_dir))
            print(f"seed {seed}, {name}: {shares[-1]:.1%}", flush=True)
    return line(seed, shares)


def half(demo: Path, name: str) -> Path:
    """Return the run folder of the teacher of some tasks. It is trained unless it is there."""
    folder = demo / f"teacher_{name}"
    if not (folder / RESULT_FILE).is_file():
        table = pq.read_table(demo / "data/train.parquet")
        chosen = pc.is_in(table["task"], pa.array(HALVES[name]))
        file = demo / f"data/{name}.parquet"
        pq.write_table(table.filter(chosen), file)
        train(demo, folder, [f"data.train_files=[{file}]", "checkpoint.export_hf=true"])
    return folder


def several_teachers(demo: Path, seed: int, urls: Sequence[str], common: Sequence[str]) -> str:
    keys = [
        f"distillation.teachers.{name}={{urls: ['{url}'], rows: [{', '.join(tasks)}]}}"
        for (name, tasks), url in zip(HALVES.items(), urls, strict=True)
    ]
    shares = [accuracy(half(demo, name)) for name in HALVES]
    return line(seed, shares + before_and_after(demo, [*common, *keys], seed))


def before_and_after(demo: Path, keys: Sequence[str], seed: int) -> list[float]:
    """Train a student by teachers only, and return its accuracy before and after."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        train(demo, run_dir, [*keys, *ONLY_TEACHERS, "evaluation.before=true"], seed=seed)
        return [accuracy(run_dir, "accuracy_before"), accuracy(run_dir)]


def hinted_start(demo: Path) -> Path:
    """Return the checkpoints of a warm start that also taught to read a hint: it has each question
    a second time, with its random answer as the hint. It is trained unless it is there.
    """
    folder = demo / "hinted_start"
    if not (folder / RESULT_FILE).is_file():
        table = pq.read_table(demo / "data/warm_start.parquet")
        asked = table.filter(pc.not_equal(table["task"], "caption"))
        answers = asked["answer"].to_pylist()
        pairs = zip(asked["problem"].to_pylist(), answers, strict=True)
        told = pa.array([problem + HINT.format(answer=answer) for problem, answer in pairs])
        column = asked.schema.get_field_index("problem")
        asked = asked.set_column(column, asked.schema.field(column), told)
        file = demo / "data/hinted.parquet"
        pq.write_table(pa.concat_tables([table, asked]), file)
        keys = [
            f"model.checkpoint={demo / 'imported'}",
            f"data.train_files=[{file}]",
            "evaluation.after=false",
        ]
        train(demo, folder, keys, "sft_shapes.yaml")
    return folder / "checkpoints"


def own_teacher(demo: Path, seed: int, common: Sequence[str]) -> str:
    keys = [
        f"model.checkpoint={hinted_start(demo)}",
        f"distillation.teachers.itself.hint='{HINT}'",
        # At the recipe's 5e-4 the teacher changes faster than the student learns from it.
        "optimizer.lr=1e-4",
    ]
    return line(seed, before_and_after(demo, [*common, *keys], seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--several", action="store_true")
    parser.add_argument("--hints", action="store_true")
    options = parser.parse_args()
    demo, common = options.demo.resolve(), [f"algorithm.steps={options.steps}"]
    with ExitStack() as stack:
        if options.hints:
            head, rows = HINTS_HEAD, (own_teacher(demo, seed, common) for seed in options.seeds)
        elif options.several:
            urls = [served(stack, half(demo, name) / "hf") for name in HALVES]
            made = (several_teachers(demo, seed, urls, common) for seed in options.seeds)
            head, rows = SEVERAL_HEAD, made
        else:
            url = served(stack, demo / "hf")
            head, rows = HEAD, (one_teacher(demo, seed, url, common) for seed in options.seeds)
        for text in (head, *rows):
            print(text, flush=True)


if __name__ == "__main__":
    main()

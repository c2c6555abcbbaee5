"""A long run of a tiny model: memory, descriptors, threads, logs and shared memory must not grow.

make soak STEPS=2000        writes tests/soak/RESULTS.md; ends with 1 if something grows
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tests.e2e.conftest import World, make_world
from tests.soak.growth import Sample, table, take_sample
from tests.support.cache import cached_folder

SAMPLES = 100  # of a whole run
LEAST = 500  # steps: caches and allocators fill in the first few hundred
RESULTS = Path(__file__).with_name("RESULTS.md")


PROMPTS, RESPONSES = 4, 4  # of a step


def command(root: Path, name: str, steps: int, **sections: dict[str, Any]) -> list[str]:
    """Make the world of a run in `root`, and return the command that trains there for `steps`."""
    made = cached_folder("world", None, make_world)
    for part in ("data", "model"):
        (root / part).symlink_to(made / part)
    recipe = World(root).recipe(
        name,
        parallel={"data": 2},
        algorithm={
            "name": "grpo",
            "steps": steps,
            "prompts_per_step": PROMPTS,
            "responses_per_prompt": RESPONSES,
            "entropy_coefficient": 0.01,
        },
        optimizer={"lr": 1e-5},
        **sections,
    )
    return [sys.executable, "-m", "megavlm", "train", str(recipe)]


def start(command: list[str], output: IO[str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def steps_done(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def soak(root: Path, steps: int) -> tuple[list[Sample], float]:
    """Run, and return the samples and the seconds from the first step to the last."""
    run_dir = root / "soak"
    words = command(
        root,
        "soak",
        steps,
        checkpoint={"every": 10, "keep_last": 2},
        evaluation={"every": 50, "sampled": False, "shuffled": False},
    )
    samples: list[Sample] = []
    every, started = max(1, steps // SAMPLES), 0.0
    with (root / "output.txt").open("w") as output:
        run = start(words, output)
        try:
            while run.poll() is None:
                time.sleep(0.05)
                done = steps_done(run_dir / "metrics.jsonl")
                started = started or (time.monotonic() if done else 0.0)
                if done < steps and done >= (samples[-1].step + every if samples else 1):
                    samples.append(take_sample(run.pid, run_dir, done))
        finally:
            run.kill()
    text = (root / "output.txt").read_text()
    assert run.returncode == 0, text
    recorded = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]
    assert recorded == list(range(1, steps + 1)), "every step is recorded once"
    return samples, time.monotonic() - started


def main() -> None:
    steps = int(sys.argv[1])
    if steps < LEAST:
        sys.exit(f"STEPS={steps} cannot tell growth from a start: take at least {LEAST}")
    with tempfile.TemporaryDirectory() as folder:
        samples, seconds = soak(Path(folder), steps)
    lines, grown = table(samples)
    head = [
        "# Soak",
        "",
        f"{steps} steps of GRPO on two ranks and one SGLang server, a tiny model on a CPU, in "
        f"{seconds:.0f} s; {len(samples)} samples. Written by `make soak`.",
        "",
    ]
    end = ["", f"Grows: {', '.join(grown)}." if grown else "Nothing grows."]
    for name in grown:
        print(name, [(sample.step, round(sample.values.get(name, 0.0))) for sample in samples])
    RESULTS.write_text("\n".join([*head, *lines, *end]) + "\n")
    print(RESULTS.read_text())
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()

"""Models, updates and checkpoints on the GPU path (stage.py), in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [
    *(f"tests/gpu_path/{name}.py" for name in ("cases", "bf16_cases", "optimizer_cases")),
    *(f"tests/distributed/test_{name}.py" for name in ("updates", "frozen_tower", "lora")),
    *(f"tests/unit/checkpointing/test_{name}.py" for name in ("checkpointing", "experts")),
]
CHOICE = "not checkpointing or resumed_run or another_layout or export_holds"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_gpu_path() -> None:
    """`make test-gpu-path` runs more, with the torch of the Dockerfile's image."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, *TESTS, "-k", CHOICE],
        cwd=ROOT,
        env=plain | {"MEGAVLM_GPU_PATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

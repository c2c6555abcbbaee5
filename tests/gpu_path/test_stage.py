"""Models, updates and checkpoints on the GPU path (stage.py), in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels import slow

ROOT = Path(__file__).parents[2]
QUICK = ["tests/gpu_path/cases.py::test_equals_transformers[qwen2_5_vl, TP2+SP, mixed]"]
MORE = [
    "tests/gpu_path/cases.py",
    *(f"tests/distributed/test_{name}.py" for name in ("updates", "frozen_tower", "lora")),
    *(f"tests/unit/checkpoints/test_{name}.py" for name in ("checkpointing", "experts")),
    "-k",
    "not checkpointing or resumed_run or another_layout or export_holds",
    f"--deselect={QUICK[0]}",
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", [QUICK, *slow((MORE,))], ids=["quick", "more"])
def test_on_the_gpu_path(arguments: list[str]) -> None:
    """`make test-gpu-path` runs more, with the torch of the GPU image."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=plain | {"MEGAVLM_GPU_PATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

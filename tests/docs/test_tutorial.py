"""The tutorial's code runs: files are written, Python blocks run, --dry-run commands pass.

Commands without --dry-run take minutes; test_names.py checks that their options and keys exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.demo.tiny_model import make_tiny_model
from tests.conftest import png
from tests.support.cache import cached_folder

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def make_model(folder: Path) -> None:
    """A model with the pixel bounds of the released ones."""
    make_tiny_model(folder, ["red"] * 9, seed=0, num_heads=8, num_kv_heads=4, max_pixels=2**24)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Make a folder with what the tutorial takes for granted: recipes, a model, photos."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/Qwen2.5-VL-3B-Instruct").symlink_to(
        cached_folder("tutorial", "", make_model)
    )
    (tmp_path / "photos").mkdir()
    for color in ("red", "blue", "green"):
        (tmp_path / f"photos/{color}_01.png").write_bytes(png())
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_tutorial_runs(workplace: Path) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    dry_runs = 0
    for language, title, block in FENCE.findall(text):
        if title:
            (workplace / title).write_text(block, encoding="utf-8")
        if language == "python" and title in ("", "make_data.py"):
            run(workplace, "-c", block)
        for line in block.splitlines() if language == "bash" else ():
            command = line.split("  #")[0].split()
            if command[0] == "megavlm" and "--dry-run" in command:
                assert "algorithm:" in run(workplace, "-m", *command)
                dry_runs += 1
    assert dry_runs >= 3
    assert (workplace / "data/train.parquet").is_file()

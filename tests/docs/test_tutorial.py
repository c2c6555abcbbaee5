"""The tutorial's code runs: files are written, Python blocks run, --dry-run commands pass.

Commands without --dry-run take minutes; test_names.py checks that their options and keys exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_tools.import_hf import import_hf
from megavlm.config.load import load
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.demo_folder import demo_folder
from megavlm.run.checks.dry_run import dry_run
from tests.conftest import png, row, write_rows
from tests.support.cache import cached_folder
from tests.support.forked import forking

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def make_model(folder: Path) -> None:
    """A model with the pixel bounds of the released ones."""
    make_tiny_model(folder, ["red"] * 9, seed=0, num_heads=8, num_kv_heads=4, max_pixels=2**24)


def make_demo(folder: Path) -> None:
    """Make what a recipe of one's own takes from the demo. Its warm start is left out."""
    make_model(folder / "model")
    import_hf(folder / "model", folder / "warm_start/checkpoints")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Make a folder with what the tutorial takes for granted: recipes, models, photos."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(cached_folder("tutorial-demo", "", make_demo))
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
    command = [sys.executable, *arguments]
    with forking():
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def test_the_recipe_for_a_cpu_trains_the_demo_s_model_on_own_rows(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert f"`{demo_folder(data=Path('data'))}/model`" in text
    for _, title, block in FENCE.findall(text):
        if title in ("tiny.yaml", "photos/train.jsonl"):
            Path(title).write_text(block, encoding="utf-8")
    Path("data").mkdir()
    rows = [{key: row()[key] for key in ("images", "problem", "answer")}] * 3
    for name in ("train", "test"):
        write_rows(Path(f"data/{name}.parquet"), rows)
    for keys, count in ([], 3), (["data.train_files=[photos/train.jsonl]"], 1):
        config = load(Path("tiny.yaml"), keys)
        assert config.parallel.num_ranks == 2 and config.rollout.servers == 1, "two CPU cores"
        checked = dry_run(config, world_size=2, phase="train")
        assert f"data.train_files, {count} row" in checked.partition("# Checked")[2]


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
    assert dry_runs >= 5
    assert (workplace / "data/train.parquet").is_file()

"""What `make setup` installs."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.install import LARGE, commands, read
from megavlm.demo.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
PINS = [*(f"package{i}==1" for i in range(30)), "torch==2", "triton==3", "sglang==1"]
LOAD = """
import sys
from transformers import AutoModelForImageTextToText, AutoProcessor
AutoProcessor.from_pretrained(sys.argv[1])
print(AutoModelForImageTextToText.from_pretrained(sys.argv[1]).config.model_type)
"""


@pytest.mark.slow
def test_a_plain_interpreter_loads_an_exported_model(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "hf", ["What colour is it?"] * 10, seed=0)
    command = [sys.executable, "-I", "-c", LOAD, str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["qwen2_5_vl"], done.stderr


def test_a_wheel_holds_every_module_and_every_other_file(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for package in ("megavlm", "checkpoint_tools"):
        ours = files(ROOT / package)
        assert len(ours) > 20 and files(tmp_path / package) == ours


def files(folder: Path) -> set[str]:
    """Paths of a package's files; bytecode is none of them."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}


def test_every_pin_is_installed_once_and_large_ones_start_first() -> None:
    for uv in (None, "uv"):
        words = [word for command, _ in commands(PINS, uv) for word in command]
        assert sorted(word for word in words if "==" in word) == sorted(PINS)
        assert sum(count for _, count in commands(PINS, uv)) == len(PINS)
    first = [command[-1].split("==")[0] for command, _ in commands(PINS, None)[:3]]
    assert set(first) == set(LARGE)


def test_torch_is_installed_by_pip_also_beside_uv() -> None:
    (command,) = [command for command, _ in commands(PINS, "uv") if "torch==2" in command]
    assert command[:4] == [sys.executable, "-m", "pip", "install"]


def test_a_later_lock_replaces_pins(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("# of all\ntorch==2\nnumpy==1\n")
    second.write_text("torch==3\ntriton==3\n")
    assert read([first, second]) == ["torch==3", "numpy==1", "triton==3"]

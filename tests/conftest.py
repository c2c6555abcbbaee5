"""Inputs that tests of several folders share: small, real, and made in milliseconds."""

import gc
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from PIL import Image
from safetensors.numpy import save_file

from megavlm.config.data import Data
from megavlm.data.rows import Row, Rows
from tests.support.timeouts import SCALE, scaled

# An example's time says what else the machine does, nothing about the code.
settings.register_profile("megavlm", deadline=None, max_examples=50)
settings.load_profile("megavlm")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each file's tests to one worker, if they name no group, as they share what they make.
    Scale the limits of pytest-timeout.
    """
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
    for item in items if SCALE != 1 else []:
        mark = item.get_closest_marker("timeout")
        limit = float(mark.args[0] if mark else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(scaled(limit)), append=False)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, except in modules, tests and their parameters, which stay."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions would report what is left as leaks


TINY_CONFIG = {
    "model_type": "qwen2_5_vl",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 384,
}


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"

DATA = Data(max_prompt_tokens=2**20)  # no prompt of a test is too long


def read_rows(files: Sequence[str], **keys: Any) -> list[Row]:
    """Return all rows of the files. keys: those of the data section."""
    return list(Rows(files, Data(**keys)))


def write_model_folder(folder: Path, **values: Any) -> Path:
    """A folder that looks complete from outside: right files, empty tokenizer, one tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **values}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text("{}")
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def png(width: int = 56, height: int = 56) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def row(**values: Any) -> dict[str, Any]:
    image = {"bytes": png(), "path": None}
    plain = {"images": [image], "problem": "<image>Colour?", "answer": "red", "task": "colour"}
    return {**plain, **values}


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe that passes every check; keyword arguments replace keys of its sections."""

    def write(**sections: dict[str, Any]) -> Path:
        model = tmp_path / "model"
        if not model.exists():
            write_model_folder(model)
            write_rows(tmp_path / "rows.parquet", [row(), row()])
        rows = [str(tmp_path / "rows.parquet")]
        recipe: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"folder": str(model)},
            "data": {"train_files": rows, "test_files": rows},
        }
        for name, values in sections.items():
            recipe[name] = {**recipe.get(name, {}), **values}
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        return path

    return write

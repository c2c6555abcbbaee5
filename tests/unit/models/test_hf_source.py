"""HF folders: read lazily, and refused with a sentence where they are wrong."""

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.hf_source import HFFolder, StateDict


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_tiny_model(folder, ["red blue"] * 10, seed=0, num_layers=1, vision_depth=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "hf"))


def split(folder: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file_name in set(places.values()):
        part = {name: x for name, x in tensors.items() if places[name] == file_name}
        save_file(part, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_sharded_files_read_like_a_single_one(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    split(folder)
    tensors = HFFolder(folder)
    assert set(tensors) == set(expected) and len(tensors) == len(expected)
    assert all(torch.equal(tensors[name], x) for name, x in expected.items())


def test_headers_and_rows_read_like_tensors(folder: Path) -> None:
    tensors, memory = HFFolder(folder), StateDict(load_file(folder / "model.safetensors"))
    assert list(memory) and len(memory) == len(tensors)
    for name, tensor in memory.items():
        assert tensors.shape(name) == memory.shape(name) == tuple(tensor.shape)
        assert tensors.dtype(name) == memory.dtype(name) == tensor.dtype
        row = tensors.row(name, 3)
        assert torch.equal(row, tensor[3]) and torch.equal(memory.row(name, 3), tensor[3])


def test_a_row_is_read_alone(tmp_path: Path) -> None:
    """Of a sparse file of 1 GB, whose other rows would become resident memory."""
    header = {"experts": {"dtype": "F32", "shape": [64, 4096, 1024], "data_offsets": [0, 2**30]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 2**30)
    tensors = HFFolder(tmp_path)
    before = psutil.Process().memory_info().rss
    assert not tensors.row("experts", 63).any()
    assert psutil.Process().memory_info().rss - before < 2**27


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index"):
        HFFolder(folder)


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../a.safetensors"}}'
    )
    with pytest.raises(
        ValueError, match=r"'\.\./a\.safetensors', but this folder has no such file"
    ):
        HFFolder(folder)

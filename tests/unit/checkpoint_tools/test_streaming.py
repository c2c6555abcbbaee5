"""Tensors that go through memory one at a time: files, rows, and what is read ahead."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_tools.safetensors_io import SafetensorsWriter, Spec, UnmappedHFFolder
from checkpoint_tools.streaming import prefetch
from megavlm.models.common.hf_source import HFFolder
from tests.support.timeouts import scaled

TENSORS = {
    "wide": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "bias": torch.randn(5),
    "half": torch.randn(7, 3).bfloat16(),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "scalar": torch.tensor(7, dtype=torch.int8),
    "flags": torch.tensor([True, False, True]),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    specs = {name: Spec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    with SafetensorsWriter(path, specs) as file:
        for tensor in tensors.values():
            file.write(tensor)


def test_the_library_reads_what_is_written_in_a_stream(tmp_path: Path) -> None:
    write(tmp_path / "ours", TENSORS)
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it


def test_rows_of_a_stack_are_written_one_by_one(tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 5)
    with SafetensorsWriter(tmp_path / "ours", {"stack": Spec(stack.dtype, (3, 5, 4))}) as file:
        for row in stack:
            file.write(row.t())
    assert torch.equal(load_file(tmp_path / "ours")["stack"], stack.mT)


def test_a_file_with_a_hole_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="8 bytes of the header were not written"):
        with SafetensorsWriter(tmp_path / "ours", {"x": Spec(torch.float32, (3,))}) as file:
            file.write(torch.ones(1))


def test_tensors_read_into_memory_equal_mapped_ones(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    ours, theirs = UnmappedHFFolder(tmp_path), HFFolder(tmp_path)
    assert set(ours) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], theirs[name]), name
        assert ours.nbytes(name) == tensor.nbytes
    assert all(torch.equal(ours.row("half", row), TENSORS["half"][row]) for row in range(7))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1000)}, tmp_path / "model.safetensors")
    files = UnmappedHFFolder(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match=r"model\.safetensors ends before x does"):
        files["x"]


def test_one_item_is_made_while_the_caller_has_the_one_before() -> None:
    made: list[int] = []
    is_made = {item: threading.Event() for item in range(5)}

    def make(item: int) -> int:
        made.append(item)
        is_made[item].set()
        return 10 * item

    results = prefetch(make, range(5))
    for item in range(5):
        assert next(results) == 10 * item
        if item < 4:
            assert is_made[item + 1].wait(scaled(60))
            assert made == list(range(item + 2))  # and none further
    assert list(results) == [] == list(prefetch(make, []))


def test_what_fails_ahead_is_raised_in_its_turn() -> None:
    results = prefetch(lambda item: 1 / item, [2, 1, 0, 4])
    assert [next(results), next(results)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)

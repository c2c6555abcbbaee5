"""Arrays and values as bytes of a safetensors file."""

import pytest
import torch
from safetensors import SafetensorError

from megavlm.arrays import from_bytes, to_bytes

ARRAYS = {
    "empty": torch.zeros(0, 3),
    "odd": torch.arange(5, dtype=torch.uint8),
    "half": torch.full((2, 3), 7, dtype=torch.bfloat16),
    "number": torch.tensor(4),
    "strided": torch.arange(6).view(2, 3).T,
    "flags": torch.tensor([True, False]),
    "shared": torch.tensor(2.5).expand(3),
}
VALUES = {"list": [1, None, "ä"], "exact": 0.1 + 0.2, "none": None}


def test_arrays_and_values_are_the_same_again() -> None:
    arrays, values = from_bytes(to_bytes(ARRAYS, VALUES))
    assert values == VALUES and arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert torch.equal(arrays[name], array) and arrays[name].dtype == array.dtype, name
    arrays["odd"][0] = 9  # it can be written
    assert arrays["odd"].tolist() == [9, 1, 2, 3, 4]


def test_other_bytes_are_refused() -> None:
    data = to_bytes(ARRAYS, VALUES)
    for broken in (b"", data[:-1], b"text" * 9):
        with pytest.raises(SafetensorError):
            from_bytes(broken)

"""The form in which arrays leave a process, to other ranks and to files: a safetensors file, whose
metadata holds plain values as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

Arrays = Mapping[str, Tensor]  # in host memory


def to_bytes(arrays: Arrays, values: Mapping[str, Any]) -> bytes:
    """Serialize arrays of any shape and plain values, both by name."""
    metadata = {name: json.dumps(value) for name, value in values.items()}
    return save({name: array.contiguous() for name, array in arrays.items()}, metadata)


def from_bytes(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Deserialize the arrays and values of `to_bytes`. Raises SafetensorError for other bytes."""
    arrays = load(data)
    # The file begins with the length of its header, which is JSON; `load` leaves the metadata out.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return arrays, {name: json.loads(text) for name, text in header["__metadata__"].items()}

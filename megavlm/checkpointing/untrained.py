"""Tensors of a HuggingFace folder that are not part of the model (`families.UNTRAINED`). A
checkpoint keeps them in its `hf/`, so that an export can copy them.

They are copied as bytes, since this module imports neither torch nor megatron-core.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from megavlm.families import UNTRAINED

FILE = "untrained.safetensors"


@dataclass(frozen=True)
class UntrainedTensor:
    """Place of a tensor in a safetensors file.

    dtype: Name of its dtype in the file's header.
    start, end: Range of its bytes in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self) -> bytes:
        """Read the tensor's bytes."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


def untrained_tensors(folder: Path) -> dict[str, UntrainedTensor]:
    """Return the untrained tensors of a HuggingFace folder, or of a checkpoint's `hf/`, by name."""
    found: dict[str, UntrainedTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, value in header.items():
            if name.startswith(UNTRAINED):
                start, end = (8 + length + offset for offset in value["data_offsets"])
                shape = tuple(value["shape"])
                found[name] = UntrainedTensor(path, value["dtype"], shape, start, end)
    return found


def copy_untrained(source: Path, target: Path) -> None:
    """Copy the untrained tensors of `source`, if it has any, to the file FILE in `target`."""
    tensors = untrained_tensors(source)
    if not tensors:
        return
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.end - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (target / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.read())

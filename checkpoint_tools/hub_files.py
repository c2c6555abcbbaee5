"""The weights of an HF folder, read into memory of their own."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.safetensors_file import Span, raw_bytes, read_spans
from megavlm.models.common.hf_source import HFFolder


class HubFiles(HFFolder):
    """An HFFolder that maps no numbers into memory: pages of a mapped file stay there, and count,
    until the whole model is in memory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._spans = {
            name: span for path in self._files for name, span in read_spans(path).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name, self._spans[name], self.shape(name))

    def row(self, name: str, index: int) -> Tensor:
        span, (count, *shape) = self._spans[name], self.shape(name)
        size = span.nbytes // count
        row = replace(span, start=span.start + index * size, nbytes=size)
        return self._read(name, row, tuple(shape))

    def dtype(self, name: str) -> torch.dtype:
        return self._spans[name].dtype

    def nbytes(self, name: str) -> int:
        return self._spans[name].nbytes

    def _read(self, name: str, span: Span, shape: tuple[int, ...]) -> Tensor:
        memory = torch.empty(span.nbytes, dtype=torch.uint8)
        buffer, done = raw_bytes(memory), 0
        with open(self.where(name), "rb", buffering=0) as file:
            file.seek(span.start)
            while done < span.nbytes:
                count = file.readinto(buffer[done:])
                if not count:
                    raise ValueError(f"{self.where(name)} ends before {name} does.")
                done += count
        return memory.view(span.dtype).view(shape)

"""Rows of tokens for the tests, and the loops that what is computed on them must equal."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Row:
    """Tokens of several sequences whose order is mixed, as float64."""

    ids: list[int]
    turns: list[int]
    num: int

    def draw(self, seed: int, scale: float = 1.0) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(len(self.ids), generator=generator, dtype=torch.float64) * scale
        values: list[float] = drawn.tolist()
        return values

    def sequences(self) -> list[list[int]]:
        """The places of each sequence's tokens."""
        return [
            [index for index, owner in enumerate(self.ids) if owner == sequence]
            for sequence in range(self.num)
        ]


ROW = Row(
    ids=[0, 0, 2, 1, 0, 2, 2, 2, 4, 4, 4, 4, 4, 0],  # 3 has no tokens
    turns=[0, 0, 0, 0, 1, 0, 1, 2, 0, 0, 1, 1, 1, 1],
    num=5,
)


def row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)

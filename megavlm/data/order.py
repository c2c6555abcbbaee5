"""The order in which rows are drawn: an endless sequence that a few numbers continue."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Blocks that are shuffled together are in memory together (see rows.CACHE_BYTES).
WINDOW_BYTES = 2**27


def epoch_order(
    block_rows: Sequence[int], block_bytes: Sequence[int], seed: int, epoch: int
) -> np.ndarray:
    """A permutation [n] of all rows, which touches only WINDOW_BYTES of blocks at a time.

    Data of up to WINDOW_BYTES is shuffled whole. Of more, the blocks are shuffled and put into
    windows, and the rows of each window are shuffled: rows of one block stay near each other.
    """
    rng = np.random.default_rng([seed, epoch])
    if sum(block_bytes) <= WINDOW_BYTES:
        return rng.permutation(sum(block_rows))
    starts = np.concatenate([[0], np.cumsum(block_rows)])
    windows: list[np.ndarray] = []
    window: list[np.ndarray] = []
    held = 0
    for block in rng.permutation(len(block_rows)):
        if window and held + block_bytes[block] > WINDOW_BYTES:
            windows.append(rng.permutation(np.concatenate(window)))
            window, held = [], 0
        window.append(np.arange(starts[block], starts[block + 1]))
        held += block_bytes[block]
    windows.append(rng.permutation(np.concatenate(window)))
    return np.concatenate(windows)


class Part:
    """The rows of one data set among all rows, and its shuffled epochs."""

    def __init__(
        self, first: int, block_rows: Sequence[int], block_bytes: Sequence[int], seed: int
    ) -> None:
        self.size = sum(block_rows)
        self._first, self._rows, self._bytes = first, block_rows, block_bytes
        self._seed = seed
        self._epoch: int | None = None
        self._order = np.empty(0, dtype=np.int64)

    def row(self, drawn: int) -> int:
        """The index of the row that is drawn after `drawn` others of this set."""
        epoch, position = divmod(drawn, self.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = epoch_order(self._rows, self._bytes, self._seed, epoch)
        return self._first + int(self._order[position])


class Draws:
    """An endless iterator over row indices: each data set's epochs, mixed by weight.

    The next row is of the set that is furthest behind its share, so that after any number of draws
    every set has been drawn within one of its share of them.
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float]) -> None:
        self._parts = parts
        self._shares = np.array(weights, dtype=np.float64) / sum(weights)
        self._drawn = [0] * len(parts)

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> int:
        behind = self._shares * (sum(self._drawn) + 1) - self._drawn
        number = int(np.argmax(behind))
        row = self._parts[number].row(self._drawn[number])
        self._drawn[number] += 1
        return row

    @property
    def epoch(self) -> int:
        """How often the set that has been gone through least has been, whole."""
        return min(n // part.size for n, part in zip(self._drawn, self._parts, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = list(state["drawn"])


class BatchDraws:
    """`size` draws at a time; what torchdata's loader takes as a batch sampler."""

    def __init__(self, draws: Draws, size: int) -> None:
        self._draws, self._size = draws, size

    def __iter__(self) -> "BatchDraws":
        return self

    def __next__(self) -> list[int]:
        return [next(self._draws) for _ in range(self._size)]

    def state_dict(self) -> dict[str, Any]:
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws.load_state_dict(state)

"""Samplers of rows. Their order is endless, and their state is a few numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Blocks that are shuffled together must fit in memory together (rows.CACHE_BYTES).
WINDOW_BYTES = 2**27


def epoch_order(
    block_rows: Sequence[int], block_bytes: Sequence[int], seed: int, epoch: int
) -> np.ndarray:
    """Return a permutation [n] of all rows that needs only WINDOW_BYTES of blocks at a time.

    Data of up to WINDOW_BYTES is shuffled as a whole. For larger data the blocks are shuffled and
    grouped into windows, and the rows of each window are shuffled, so that rows of a block stay in
    the same window.
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


class DataSetOrder:
    """Shuffled epochs of one data set. Its rows are consecutive among all rows."""

    def __init__(
        self, first: int, block_rows: Sequence[int], block_bytes: Sequence[int], seed: int
    ) -> None:
        self.size = sum(block_rows)
        self._first, self._rows, self._bytes = first, block_rows, block_bytes
        self._seed = seed
        self._epoch: int | None = None
        self._order = np.empty(0, dtype=np.int64)

    def row(self, drawn: int) -> int:
        """Return the index of the row that is drawn after `drawn` draws from this data set."""
        epoch, position = divmod(drawn, self.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = epoch_order(self._rows, self._bytes, self._seed, epoch)
        return self._first + int(self._order[position])


class RowSampler:
    """Endless iterator over row indices. It mixes the epochs of the data sets by weight.

    The next row is drawn from the data set that is furthest behind its share. After any number of
    draws, the number of rows drawn from a data set is within one of its share.
    """

    def __init__(self, data_sets: Sequence[DataSetOrder], weights: Sequence[float]) -> None:
        self._data_sets = data_sets
        self._shares = np.array(weights, dtype=np.float64) / sum(weights)
        self._drawn = [0] * len(data_sets)

    def __iter__(self) -> "RowSampler":
        return self

    def __next__(self) -> int:
        behind = self._shares * (sum(self._drawn) + 1) - self._drawn
        number = int(np.argmax(behind))
        row = self._data_sets[number].row(self._drawn[number])
        self._drawn[number] += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = list(state["drawn"])


class BatchSampler:
    """Batch sampler for torchdata's loader. It yields lists of `size` row indices."""

    def __init__(self, draws: RowSampler, size: int) -> None:
        self._draws, self._size = draws, size

    def __iter__(self) -> "BatchSampler":
        return self

    def __next__(self) -> list[int]:
        return [next(self._draws) for _ in range(self._size)]

    def state_dict(self) -> dict[str, Any]:
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws.load_state_dict(state)

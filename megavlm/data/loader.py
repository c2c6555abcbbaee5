"""The order in which training sees its rows: shuffled anew each epoch, and resumed exactly."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megavlm.data.rows import Row


class RowStream:
    """An endless stream of row indices; an epoch holds every row once, in an order of its own."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        """Raises ValueError where there is no row."""
        if not rows:
            raise ValueError("data.train_files: there are no rows to train on")
        self._num_rows = len(rows)
        self._seed = seed
        self._fingerprint = fingerprint(rows)
        self._epoch = self._position = 0
        self._order = self._shuffle(0)

    def take(self, n: int) -> list[int]:
        """The next n indices; an epoch's end is no border."""
        indices: list[int] = []
        while len(indices) < n:
            if self._position == self._num_rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffle(self._epoch)
            end = min(self._position + n - len(indices), self._num_rows)
            indices += self._order[self._position : end].tolist()
            self._position = end
        return indices

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: a few numbers, not the order (the seed gives that again)."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; raises ValueError for other data or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                "data.train_files: the checkpoint was made with other rows, or the same in "
                "another order; use its data, or start with run.resume=never"
            )
        if state["seed"] != self._seed:
            raise ValueError(
                f"run.seed: {self._seed}, but the checkpoint was made with {state['seed']}; "
                "use that, or start with run.resume=never"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffle(self._epoch)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)


def fingerprint(rows: Sequence[Row]) -> str:
    """Tells data sets apart by their content and order, wherever their files lie."""
    digest = hashlib.sha256()
    for row in rows:
        parts = [row.problem.encode(), row.answer.encode(), row.category.encode(), *row.images]
        if row.extra:
            parts.append(repr(sorted(row.extra.items())).encode())
        for video in row.videos:
            parts += [repr(video.fps).encode(), *video.frames]
        # Lengths first: ("ab", "c") is not ("a", "bc").
        digest.update(repr([len(part) for part in parts]).encode())
        for part in parts:
            digest.update(part)
    return digest.hexdigest()

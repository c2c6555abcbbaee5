"""Sets of tokens: at each target, the tokens that top-p and top-k kept when it was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenSets:
    """Sets of token ids of n targets. An empty set stands for the whole vocabulary. Sizes stay in
    host memory, so that cutting the sets does not wait for the GPU.

    Example, a target that was sampled among tokens 5 and 9, and one that was sampled among all:
        sizes  [2, 0]
        ids    [5, 9]
        owners [0, 0]
    """

    sizes: Tensor  # [n] int32
    ids: Tensor  # [K] int32, target by target
    owners: Tensor  # [K] int32, the target of each id

    @classmethod
    def of(cls, sizes: Tensor, ids: Tensor) -> "TokenSets":
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
        return cls(sizes, ids, owners)

    @classmethod
    def joined(
        cls, parts: Sequence["TokenSets | None"], lengths: Sequence[int]
    ) -> "TokenSets | None":
        """Return the sets of parts of targets, one after the other; None if no part has sets.
        lengths: Number of targets in each part.
        """
        known = [part for part in parts if part is not None]
        if not known:
            return None
        sizes = [
            torch.zeros(length, dtype=torch.int32) if part is None else part.sizes
            for part, length in zip(parts, lengths, strict=True)
        ]
        return cls.of(torch.cat(sizes), torch.cat([part.ids for part in known]))

    def select(self, index: Tensor | slice) -> "TokenSets":
        """Return the sets of the targets that `index` selects: a slice, or int64 positions."""
        sizes = self.sizes[index]
        ahead = self.sizes.cumsum(0)[index] - sizes.cumsum(0)
        places = torch.arange(int(sizes.sum())) + ahead.repeat_interleave(sizes)
        return TokenSets.of(sizes, self.ids[places])

    def to(self, device: torch.device | str) -> "TokenSets":
        """Return the same sets with their ids on `device`."""
        return TokenSets(self.sizes, self.ids.to(device), self.owners.to(device))

    def chunks(self, size: int, first: int) -> list[tuple[Tensor, Tensor]]:
        """Return the rows [K] and ids [K] int64 of the sets of each `size` targets. Rows are
        numbers of targets within the chunk; ids are counted from `first`.
        """
        counts = [int(sizes.sum()) for sizes in self.sizes.split(size)]
        parts = zip(self.owners.split(counts), self.ids.split(counts), strict=True)
        return [(rows.long() - n * size, ids.long() - first) for n, (rows, ids) in enumerate(parts)]

"""Sets of tokens: at each target, the tokens that top-p and top-k kept when it was sampled, or a
teacher's likeliest tokens with their log-probs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenSets:
    """Sets of token ids of n targets. Of kept tokens, an empty set stands for the whole vocabulary;
    of a teacher's, for a target that it did not score. Sizes stay in host memory, so that cutting
    the sets does not wait for the GPU.

    Example, a target that was sampled among tokens 5 and 9, and one that was sampled among all:
        sizes  [2, 0]
        ids    [5, 9]
        owners [0, 0]
    """

    sizes: Tensor  # [n] int32
    ids: Tensor  # [K] int32, target by target
    owners: Tensor  # [K] int32, the target of each id
    logprobs: Tensor | None = None  # [K] float32, nats, by a teacher

    @classmethod
    def of(cls, sizes: Tensor, ids: Tensor, logprobs: Tensor | None = None) -> "TokenSets":
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
        return cls(sizes, ids, owners, logprobs)

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
        logprobs = [part.logprobs for part in known if part.logprobs is not None]
        ids = torch.cat([part.ids for part in known])
        return cls.of(torch.cat(sizes), ids, torch.cat(logprobs) if logprobs else None)

    @staticmethod
    def to_arrays(name: str, sets: "TokenSets | None") -> dict[str, Tensor]:
        """Return the arrays of a column `name` of sets; none if there are none."""
        if sets is None:
            return {}
        arrays = {f"{name}_sizes": sets.sizes, f"{name}_ids": sets.ids}
        return arrays if sets.logprobs is None else {**arrays, f"{name}_logprobs": sets.logprobs}

    @classmethod
    def from_arrays(cls, name: str, arrays: Mapping[str, Tensor]) -> "TokenSets | None":
        """Return the sets of `to_arrays`."""
        if f"{name}_ids" not in arrays:
            return None
        logprobs = arrays.get(f"{name}_logprobs")
        return cls.of(arrays[f"{name}_sizes"], arrays[f"{name}_ids"], logprobs)

    def select(self, index: Tensor | slice) -> "TokenSets":
        """Return the sets of the targets that `index` selects: a slice, or int64 positions."""
        sizes = self.sizes[index]
        ahead = self.sizes.cumsum(0)[index] - sizes.cumsum(0)
        places = torch.arange(int(sizes.sum())) + ahead.repeat_interleave(sizes)
        logprobs = None if self.logprobs is None else self.logprobs[places]
        return TokenSets.of(sizes, self.ids[places], logprobs)

    def to(self, device: torch.device | str) -> "TokenSets":
        """Return the same sets with their ids and log-probs on `device`."""
        logprobs = None if self.logprobs is None else self.logprobs.to(device)
        return TokenSets(self.sizes, self.ids.to(device), self.owners.to(device), logprobs)

    def chunks(self, size: int, first: int) -> list[tuple[Tensor, Tensor]]:
        """Return the rows [K] and ids [K] int64 of the sets of each `size` targets. Rows are
        numbers of targets within the chunk; ids are counted from `first`.
        """
        counts = [int(sizes.sum()) for sizes in self.sizes.split(size)]
        parts = zip(self.owners.split(counts), self.ids.split(counts), strict=True)
        return [(rows.long() - n * size, ids.long() - first) for n, (rows, ids) in enumerate(parts)]

    def table(self) -> tuple[Tensor, Tensor]:
        """Return the ids [n, k] and log-probs [n, k] of a teacher's sets of up to k tokens. Smaller
        sets are filled up with id -1 of probability 0.
        """
        assert self.logprobs is not None
        n, k = len(self.sizes), max(self.sizes.tolist(), default=0)
        starts = (self.sizes.cumsum(0) - self.sizes).to(self.ids.device)
        owners = self.owners.long()
        index = torch.arange(len(self.ids), device=self.ids.device) - starts[owners] + k * owners
        ids, logprobs = self.ids.new_full((n * k,), -1), self.logprobs.new_full((n * k,), -1e30)
        return (
            ids.index_copy_(0, index, self.ids).view(n, k),
            logprobs.index_copy_(0, index, self.logprobs).view(n, k),
        )

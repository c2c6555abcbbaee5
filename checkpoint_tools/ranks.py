"""The processes of one conversion: a single one, or the ranks that torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megavlm.checkpointing.together import together

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def together(self, what: str, action: Callable[[], T]) -> list[T]:
        """Results by rank. What fails on one rank fails on all, as in `checkpointing.together`."""
        return together(what, action) if self.size > 1 else [action()]


@contextmanager
def joined() -> Iterator[Ranks]:
    """Under torchrun the ranks meet; no tensor travels between them."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()

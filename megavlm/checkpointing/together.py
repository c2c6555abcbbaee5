"""Work that succeeds on all ranks, or raises on all ranks."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; older ones are intact."""


def together(what: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns the results by rank. A barrier.

    A ValueError on one rank becomes a ValueError on all; another failure a CheckpointError.
    """
    rank = dist.get_rank()
    answer: tuple[T | None, str | None, bool] = (None, None, False)
    try:
        answer = (action(), None, False)
    except ValueError as error:
        answer = (None, str(error), True)
    except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
        answer = (None, f"{what} failed on rank {rank}: {error}", False)
    answers = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    for _, problem, is_users in answers:
        if problem is not None:
            raise ValueError(problem) if is_users else CheckpointError(problem)
    return [result for result, _, _ in answers]  # type: ignore[misc]  # no problem: results

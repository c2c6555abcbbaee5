"""Actions that succeed on all ranks or raise on all ranks."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from megavlm.process import CheckpointError

T = TypeVar("T")


def run_on_all_ranks(
    what: str,
    action: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    *,
    hint: Callable[[], str] = str,
) -> list[T]:
    """Run `action` on every rank and return the results by rank. Collective.

    group: A group of all ranks. A thread other than the main thread needs its own group.
    hint: Function that the rank that fails calls for the text at the end of its error message.

    If the action fails on one rank, every rank raises. A ValueError stays a ValueError; any other
    failure becomes a CheckpointError that names `what` and the rank. On the rank that failed, the
    original exception is its cause.
    """
    result: T | None = None
    problem: ValueError | CheckpointError | None = None
    cause: BaseException | None = None
    try:
        result = action()
    except ValueError as error:
        problem, cause = ValueError(str(error)), error
    except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
        # torch's message holds the tracebacks of all ranks; its last line has the reason.
        reason = str(error).strip().rpartition("\n")[-1] or type(error).__name__
        problem = CheckpointError(f"{what} failed on rank {dist.get_rank()}: {reason}{hint()}")
        cause = error
    answers: list[tuple[T | None, ValueError | CheckpointError | None]]
    answers = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (result, problem), group=group)
    first = next((problem for _, problem in answers if problem is not None), None)
    if first is not None:
        raise first from cause
    return [result for result, _ in answers]  # type: ignore[misc]  # no problem: all are results

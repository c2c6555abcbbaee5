"""Limits that a process sets on itself."""

import math
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megavlm.process import adopt_orphans, die_with, leave_to_parent


def limit(memory_bytes: int, parent: int) -> None:
    """Limit the memory of this process, and make it end when the process `parent` ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The hard limit stays, so that a child which reserves much more than it uses can be exempted.
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with(parent)
    adopt_orphans()  # so that the trainer can find and kill them
    leave_to_parent()  # Slurm signals every process of a job, but the trainer finishes its step


def limit_cpu(seconds: float) -> None:
    """Limit the processor time of this process from now on; its children inherit the limit. The
    limit holds even if the trainer no longer exists.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


@contextmanager
def memory_limit_lifted() -> Iterator[None]:
    """Lift the memory limit of this process for a moment, in which a child starts that has none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_data_only() -> None:
    """Limit the memory that this process writes to, in place of its address space, by the same
    number. Browsers reserve terabytes of addresses and use few of them. Children inherit the limit,
    each for itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def has_children() -> bool:
    """Return True if a child of this process still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # a child that had ended is reaped
    except ChildProcessError:
        return False
    return True

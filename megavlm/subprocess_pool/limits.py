"""Limits that a process sets on itself."""

import ctypes
import math
import os
import resource
import signal
import sys
import time

from megavlm.process import leave_to_parent

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def limit(memory_bytes: int, parent: int) -> None:
    """Limit the memory of this process, and make it end when the process `parent` ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None).prctl
    # This process is killed when the trainer ends. Orphaned descendants become its children, so
    # that the trainer can find and kill them.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    leave_to_parent()  # Slurm signals every process of a job, but the trainer finishes its step
    if os.getppid() != parent:
        sys.exit()


def limit_cpu(seconds: float) -> None:
    """Limit the processor time of this process from now on; its children inherit the limit. The
    limit holds even if the trainer no longer exists.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


def has_children() -> bool:
    """Return True if a child of this process still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # a child that had ended is reaped
    except ChildProcessError:
        return False
    return True

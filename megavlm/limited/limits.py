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
    """Limit the memory of this process, and end it with the process `parent`."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None).prctl
    # The trainer's end is this process's end; and what its children leave behind becomes its child,
    # where the trainer finds it.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    leave_to_parent()  # Slurm signals every process of a job, and the step goes on to its end
    if os.getppid() != parent:
        sys.exit()


def limit_cpu(seconds: float) -> None:
    """Limit the processor time of this process and its children from now on, even if the trainer is
    gone.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


def has_children() -> bool:
    """Return True if a process that this one started still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # one that had ended
    except ChildProcessError:
        return False
    return True

"""A process of a run: its start with large packages (torch, megatron-core, transformers), requests
to it by signals and by a file, and its end with an exit code.
"""

import atexit
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import NoReturn

# A preemption, Slurm's warning before the time limit, and the end of a terminal.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Folder in the run directory that the watchdog writes stacks to, and a file in it: when that is not
# empty, servers on the rollout nodes of a Slurm job write theirs to their logs.
STACKS, STACKS_WANTED = "stacks", "wanted_of_servers"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after a fork


class ExitCode(IntEnum):
    """Ends of a run, by which a batch script decides whether to start it again. The same command
    goes on from the last checkpoint in every case.

    The values are BSD's (sysexits.h) where one fits. A rank that is killed by signal n ends the run
    with 128 + n, as in a shell.
    """

    DONE = 0
    FAULT = 1  # an error of the program: it shows a traceback
    USER_ERROR = 2  # a recipe, file or option is wrong: starting it again changes nothing
    TRANSIENT = 69  # servers, another rank, the network or the file system failed
    NOT_FINITE = 70  # too many updates in a row had gradients that are not finite
    HUNG = 71  # no rank made progress, see parallel/watchdog.py: start it again
    STOPPED = 75  # stopped on request, or by its time limit, with a checkpoint: start it again


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Older checkpoints are intact."""


class NotFiniteError(RuntimeError):
    """Too many updates in a row had non-finite gradients."""


@contextmanager
def loading_packages() -> Iterator[None]:
    """Import without garbage collection. It would take a fifth of the time and free nothing,
    because the objects of packages stay in use. Later collections leave these objects out too: with
    half a million of them, each collection would stop a rank for a quarter of a second, and also
    the ranks that wait for it.
    """
    atexit.register(gc.unfreeze)  # or extensions would report all that is left as leaks
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def allow_open_files() -> None:
    """Raise the number of files that this process may open to the most that it may set."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave(code: int) -> NoReturn:
    """End the process at once, with its output written. Python would free all objects first, for a
    second or two, and can abort with open process groups, which would hide the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass  # a full disk, or nobody reads it
    os._exit(code)


class Stopped(BaseException):
    """A request to stop where there is no step to finish. Not an Exception: it passes through
    handlers of errors, as KeyboardInterrupt does.
    """


def stop_at_once() -> None:
    """Raise Stopped in the main thread upon a request to stop, from now on."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


@contextmanager
def stop_deferred() -> Iterator[None]:
    """Handle requests to stop after the context, so that no exception is raised within it. One that
    passes through an import of Triton, for example, would abort the process in C++.
    """
    asked: list[int] = []
    handlers = {
        number: signal.signal(number, lambda caught, _: asked.append(caught))
        for number in STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if asked:
        signal.raise_signal(asked[0])


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, process `parent`, dies. To the kernel,
    the parent is the thread that started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def leave_to_parent() -> None:
    """Ignore Ctrl-C and requests to stop: the parent process handles them and ends this one."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)

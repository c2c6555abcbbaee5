"""Quick start and end of a process with large packages: torch, megatron-core, transformers; and how
many files it may open.
"""

import atexit
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def loading_packages() -> Iterator[None]:
    """Import without garbage collection, which takes a fifth of the time and finds nothing: what
    packages make stays. Later collections leave it out too: with half a million objects, each
    would stop a rank for a quarter of a second, and those that wait for it.
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

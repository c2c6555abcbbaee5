"""Start and end of a process that is a fork and shall be like one that was executed."""

import atexit
import gc
import io
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def take_streams(*streams: int) -> None:
    """Make the descriptors, of which -1 is this process's own, the three streams; close others."""
    high = [os.dup(number if stream == -1 else stream) for number, stream in enumerate(streams)]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            io.FileIO(number, "w", closefd=False), line_buffering=True, errors="backslashreplace"
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # Libraries' handlers have pytest's stream, whose descriptor may be a socket of gloo by now: a
    # warning of transformers in it would stop a collective forever.
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr


def forget_parent(environment: Mapping[str, str] | None) -> None:
    """Forget what is the parent's: its handlers, hooks, exit functions, children and settings.

    environment: Variables that replace the parent's; None leaves them.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()
    logging.disable(logging.NOTSET)  # torchrun's process shows no log of its own
    warnings.simplefilter("ignore")
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    tempfile.tempdir = None
    gc.freeze()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)


def run_and_exit(program: Callable[[], Any]) -> NoReturn:
    """Call a program, and end this process as Python does."""
    code: Any = 1
    try:
        program()
        code = None
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(code or 0)

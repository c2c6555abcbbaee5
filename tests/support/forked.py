"""`python -m megavlm` forked from this process, which has imported what it needs.

Started as a user starts it, a run imports torch in its command, in torchrun and in each rank, and
megatron-core and transformers in each rank: ten seconds of CPU time a rank. Within `forking` these
processes are forks, each of the process that starts it. Whatever else Popen is told holds for them
too: arguments, environment, streams, session, parent and exit code.

Other programs (servers, producers, reward processes) are executed. /proc has a fork's command line,
but not its environment.
"""

import atexit
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import setproctitle
import torch

from megavlm.parallel import platform

FORKED = ("megavlm", "megavlm.run.launcher")
# What the command, torchrun and ranks import late.
IMPORTED = (
    "megavlm.run.checks.preflight",
    "megavlm.run.evaluate",
    "megavlm.run.export",
    "megavlm.run.rollout",
    "megavlm.run.train",
    "megavlm.run.worker",
    "torch.distributed.run",
)
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@contextmanager
def forking() -> Iterator[None]:
    """Fork instead of executing, in this process and in all forks."""
    platform.install()
    for name in IMPORTED:
        importlib.import_module(name)
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]


def _fork_or_execute(
    popen: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: Any,
    pass_fds: Any,
    cwd: Any,
    env: Any,
    startupinfo: Any,
    creationflags: Any,
    shell: Any,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    start_new_session: bool,
    process_group: int,
) -> None:
    """Stand in for Popen's method of the same arguments."""
    words = [str(word) for word in args] if isinstance(args, list | tuple) else []
    module = words.index("-m") + 1 if "-m" in words else 0
    if not module or words[0] != sys.executable or words[module] not in FORKED:
        _execute(
            popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
            creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            restore_signals, gid, gids, uid, umask, start_new_session, process_group,
        )  # fmt: skip
        return
    assert preexec_fn is None and not pass_fds and not shell
    popen.pid = os.fork()
    if popen.pid == 0:
        try:
            if start_new_session:
                os.setsid()
            setproctitle.setproctitle(" ".join(words))  # before the environment moves
            _take_streams(p2cread, c2pwrite, errwrite)
            os.chdir(cwd or ".")
            _start_anew(env)
            _run(words[module], words[module + 1 :])
        finally:
            os._exit(1)  # never into the test
    popen._child_created = True
    popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _take_streams(*streams: int) -> None:
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


def _start_anew(environment: Mapping[str, str] | None) -> None:
    """Forget what is the parent's: its handlers, hooks, exit functions, children and settings."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
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
    gc.freeze()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    path = os.environ.get("PYTHONPATH")
    sys.path[:0] = [os.getcwd(), *(path.split(os.pathsep) if path else [])]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(module: str, arguments: list[str]) -> NoReturn:
    """Run the module as a program, and end this process as Python does."""
    sys.argv = [module, *arguments]
    code: Any = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
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

"""`python -m megavlm` forked from this process, which has imported what it needs.

Started as a user starts it, a run imports torch in its command, in torchrun and in each rank, and
megatron-core and transformers in each rank: ten seconds of CPU time a rank. Within `forking` these
processes are forks, each of the process that starts it. Whatever else Popen is told holds for them
too: arguments, environment, streams, session, parent and exit code.

Servers are forked from another process (`forked_servers.py`). Other programs (producers, reward
processes) are executed. /proc has a fork's command line, but not its environment.
"""

import faulthandler
import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import setproctitle
import torch

from megavlm.parallel import platform
from tests.support.fork_start import forget_parent, run_and_exit, take_streams
from tests.support.forked_servers import forking_servers

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
def forking(*, servers: bool = True) -> Iterator[None]:
    """Fork instead of executing, in this process and in all forks. servers: SGLang's, too."""
    platform.install()
    for name in IMPORTED:
        importlib.import_module(name)
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
    try:
        with forking_servers() if servers else nullcontext():
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
            take_streams(p2cread, c2pwrite, errwrite)
            os.chdir(cwd or ".")
            faulthandler.disable()
            forget_parent(env)
            path = os.environ.get("PYTHONPATH")
            sys.path[:0] = [os.getcwd(), *(path.split(os.pathsep) if path else [])]
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            sys.argv = words[module:]
            run_and_exit(
                lambda: runpy.run_module(words[module], run_name="__main__", alter_sys=True)
            )
        finally:
            os._exit(1)  # never into the test
    popen._child_created = True
    popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

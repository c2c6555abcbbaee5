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
from tests.support.forked_servers import execution, forking_servers, keep_own_ends

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


def _fork_or_execute(popen: Any, args: Any, *rest: Any) -> None:
    """Stand in for Popen's method of the same arguments."""
    words = [str(word) for word in args] if isinstance(args, list | tuple) else []
    module = words.index("-m") + 1 if "-m" in words else 0
    if not module or words[0] != sys.executable or words[module] not in FORKED:
        _execute(popen, args, *rest)
        return
    call = execution(popen, args, *rest)
    assert call.preexec_fn is None and not call.pass_fds and not call.shell
    popen.pid = os.fork()
    if popen.pid == 0:
        try:
            if call.start_new_session:
                os.setsid()
            setproctitle.setproctitle(" ".join(words))  # before the environment moves
            take_streams(call.p2cread, call.c2pwrite, call.errwrite)
            os.chdir(call.cwd or ".")
            faulthandler.disable()
            forget_parent(call.env)
            path = os.environ.get("PYTHONPATH")
            sys.path[:0] = [os.getcwd(), *(path.split(os.pathsep) if path else [])]
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            sys.argv = words[module:]
            run_and_exit(
                lambda: runpy.run_module(words[module], run_name="__main__", alter_sys=True)
            )
        finally:
            os._exit(1)  # never into the test
    keep_own_ends(call)

"""Start the ranks of a run on this machine with torchrun, and leave no process behind.

    megavlm train            this process: checks, forwards signals, waits, kills what is left
      python -m megavlm.run.launcher    torch.distributed.run, in its own session
        python -m megavlm train     one worker per rank (RANK is set): megavlm/run/worker.py
          ...                       processes of a worker: rollout servers, reward processes

Each process asks the kernel to kill it when its parent dies, so nothing survives SIGKILL of the
first one. Not covered: several nodes (launch/slurm.sbatch starts torchrun on each).
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

AGENT_PID = "MEGAVLM_AGENT_PID"  # the process that must be a worker's parent
REASON_FILE = "MEGAVLM_REASON_FILE"  # exists once the reason for the end was printed
GRACE = 20.0  # seconds from the first signal to SIGKILL; a second signal kills at once

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def run_workers(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `python -m megavlm ARGUMENTS` on `num_ranks` ranks. Returns the run's exit code.

    The exit code is 0, the code of the rank that failed first, or 128 + the number of the signal
    that ended it. SIGINT and SIGTERM are forwarded. Call it in the main thread: it sets handlers.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the run become children of this process
    print(f"starting {num_ranks} rank{'s' * (num_ranks > 1)}", flush=True)
    before = {child.pid for child in psutil.Process().children()}
    command = [sys.executable, "-m", "megavlm.run.launcher", str(os.getpid()), str(num_ranks)]
    signals: list[int] = []
    handlers = {
        number: signal.signal(number, lambda caught, _: signals.append(caught))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with tempfile.TemporaryDirectory(prefix="megavlm-") as folder:
            reason = Path(folder, "reason")
            environment = {**os.environ, REASON_FILE: str(reason)}
            # More threads than cores are slower, and torchrun warns if it is unset.
            environment.setdefault("OMP_NUM_THREADS", "1")
            process = subprocess.Popen(
                [*command, *arguments], env=environment, start_new_session=True
            )
            return _wait(process, signals, reason)
    finally:
        _sweep(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, process `parent`, dies."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], signals: list[int], reason: Path) -> int:
    """Wait for the process and return its exit code.

    Forwards the first of `signals`, which the handlers append to, and kills the process GRACE
    seconds later, or at the second signal.
    """
    deadline = float("inf")
    while True:
        try:
            code = process.wait(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            pass
        if signals and deadline == float("inf"):
            reason.touch()  # the user sent the signal: errors of the ranks explain nothing
            deadline = time.monotonic() + GRACE
            process.send_signal(signals[0])
        if len(signals) > 1 or time.monotonic() > deadline:
            process.kill()
    if signals:
        return 128 + signals[0]
    return code if code >= 0 else 128 - code


def _sweep(before: set[int]) -> None:
    """Kill all descendants, except the children `before` the run and their descendants."""
    while True:
        roots = [child for child in psutil.Process().children() if child.pid not in before]
        if not roots:
            return
        for root in roots:
            try:
                family = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
        psutil.wait_procs(roots)  # reaps them; SIGKILL cannot be ignored, so this ends


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _agent(parent: str, num_ranks: str, *arguments: str) -> int:
    """Run torchrun without its banner. Returns the exit code of the first worker that failed."""
    die_with(int(parent))
    os.environ[AGENT_PID] = str(os.getpid())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of torchrun, which alone logs in this process
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    try:
        run.run(run.parse_args([*options, "--module", "megavlm", *arguments]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = int(failure.exitcode)
        if not os.path.exists(os.environ[REASON_FILE]):
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            print(f"megavlm: rank {rank} ended with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(_agent(*sys.argv[1:]))

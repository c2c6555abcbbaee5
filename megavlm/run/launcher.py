"""Starts the ranks of a run on this machine with torchrun, and leaves no process behind.

    megavlm train            this process: checks, forwards signals, waits, sweeps
      python -m megavlm.run.launcher    torch.distributed.run, in a session of its own
        python -m megavlm train     a worker for each rank (RANK is set): megavlm/run/worker.py
          ...                       what a worker starts: rollout servers, reward processes

Each process asks the kernel to kill it when its parent dies, so that even SIGKILL of the first
leaves nothing. Not covered: several nodes (launch/slurm.sbatch starts torchrun on each).
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
REASON_FILE = "MEGAVLM_REASON_FILE"  # exists once the user has been told why the run ends
GRACE = 20.0  # seconds from the first signal to SIGKILL; a second signal kills at once

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def run_workers(arguments: Sequence[str], num_ranks: int) -> int:
    """`python -m megavlm ARGUMENTS` on `num_ranks` ranks; the exit code that they give the run.

    That is 0, the code of the rank that failed first, or 128 + the number of the signal that ended
    it. SIGINT and SIGTERM are passed on while it runs (main thread only, as for any handler).
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the run become ours, to be found and killed
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
            # More threads a rank than cores make everything slower; torchrun warns if it is unset.
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
    """Have the kernel kill this process when its parent, process `parent`, dies."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], signals: list[int], reason: Path) -> int:
    """Its exit code; forwards the first of `signals`, which handlers fill, and then gives it
    GRACE seconds."""
    deadline = float("inf")
    while True:
        try:
            code = process.wait(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            pass
        if signals and deadline == float("inf"):
            reason.touch()  # whatever the ranks run into now, the user knows the reason
            deadline = time.monotonic() + GRACE
            process.send_signal(signals[0])
        if len(signals) > 1 or time.monotonic() > deadline:
            process.kill()
    if signals:
        return 128 + signals[0]
    return code if code >= 0 else 128 - code


def _sweep(before: set[int]) -> None:
    """Kill every descendant but the children `before` the run and theirs."""
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
        psutil.wait_procs(roots)  # killed for certain, so this ends; reaps them too


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _agent(parent: str, num_ranks: str, *arguments: str) -> int:
    """torchrun, but with the workers' exit code and without its banner."""
    die_with(int(parent))
    os.environ[AGENT_PID] = str(os.getpid())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's own words; this process has no others
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

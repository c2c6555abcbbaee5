"""Start the ranks of a run on this machine with torchrun, and leave no process behind.

    megavlm train            this process: checks, forwards signals, waits, kills what is left
      python -m megavlm.run.launcher    torch.distributed.run, in its own session
        python -m megavlm train     one worker per rank (RANK is set): megavlm/run/worker.py
          ...                       processes of a worker: rollout servers, reward processes

Each process asks the kernel to kill it when its parent dies, so no process survives a SIGKILL of
the first. A run on several nodes has these processes on each node.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from megavlm.process import (
    STOP_SIGNALS,
    ExitCode,
    adopt_orphans,
    die_with,
    leave,
    loading_packages,
)
from megavlm.temporary import temporary_folder

AGENT_PID = "MEGAVLM_AGENT_PID"  # the process that must be a worker's parent
REASON_FILE = "MEGAVLM_REASON_FILE"  # file that exists once the reason for the end was printed
LEAVE = 3.0  # seconds for processes that end and clean up by themselves after their parent

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and the rank of this machine."""

    count: int = 1
    rank: int = 0
    master: str = ""  # HOST:PORT of the first machine; not needed for one

    @classmethod
    def given(cls, count: int, rank: int | None, master: str | None) -> Self:
        """Check the options and return them. Raises ValueError that says which is missing or
        wrong.
        """
        if count == 1:
            return cls()
        host, _, port = (master or "").rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"--nodes {count} needs --master HOST:PORT, an address of the first node that all "
                f"others reach, but it is {master!r}"
            )
        if rank is None or rank >= count:
            raise ValueError(
                f"--nodes {count} needs --node-rank, 0 to {count - 1}, but it is {rank}; "
                "0 is the node of --master"
            )
        return cls(count, rank, master or "")

    def ranks_of_each(self, num_ranks: int) -> int:
        """Return the number of ranks on each machine. Raises ValueError if they differ."""
        if num_ranks % self.count:
            raise ValueError(
                f"--nodes {self.count} does not divide the {num_ranks} ranks of the layout: "
                "change parallel.data, or the number of nodes"
            )
        return num_ranks // self.count

    @property
    def torchrun_options(self) -> list[str]:
        if self.count == 1:
            return [f"--master-addr={LOOPBACK}", "--master-port=0"]
        host, _, port = self.master.rpartition(":")
        return [
            f"--nnodes={self.count}",
            f"--node-rank={self.rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]


ONE_NODE = Nodes()


def run_workers(arguments: Sequence[str], num_ranks: int, nodes: Nodes = ONE_NODE) -> int:
    """Run `python -m megavlm ARGUMENTS` on `num_ranks` ranks of this machine. Returns the run's
    exit code: the exit code of the first rank that failed (process.py), or 128 + the number of the
    signal that ended it.

    SIGTERM, SIGUSR1, SIGHUP and a first SIGINT (Ctrl-C) make the ranks stop after their step. A
    second SIGINT ends them at once. Call it in the main thread, because it sets signal handlers.
    """
    adopt_orphans()
    print(f"starting {num_ranks} rank{'s' * (num_ranks > 1)}", flush=True)
    before = {child.pid for child in psutil.Process().children()}
    options = [*nodes.torchrun_options, f"--nproc-per-node={num_ranks}"]
    signals: list[int] = []
    handlers = {
        number: signal.signal(number, lambda caught, _: signals.append(caught))
        for number in (signal.SIGINT, *STOP_SIGNALS)
    }
    try:
        with temporary_folder("megavlm-run-") as folder:
            reason = folder / "reason"
            environment = {**os.environ, REASON_FILE: str(reason)}
            # More threads than cores are slower. torchrun also warns if the variable is unset.
            environment.setdefault("OMP_NUM_THREADS", "1")
            # By default torchrun would leave a log folder for each run.
            options += [f"--log-dir={folder}"]
            command = [sys.executable, "-m", "megavlm.run.launcher", str(os.getpid()), *options]
            process = subprocess.Popen(
                [*command, "--module", "megavlm", *arguments],
                env=environment,
                start_new_session=True,
            )
            return _wait(process, signals, reason)
    finally:
        _sweep(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], signals: list[int], reason: Path) -> int:
    """Wait for the process and return its exit code. Meanwhile forward `signals`, a list to which
    the signal handlers append.
    """
    forwarded = 0
    while True:
        try:
            code = process.wait(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            pass
        for number in signals[forwarded:]:
            forwarded += 1
            if number != signal.SIGINT:
                process.send_signal(number)
            elif signals[:forwarded].count(signal.SIGINT) == 1:
                print(
                    "megavlm: stopping after this step; Ctrl-C again ends the run at once",
                    file=sys.stderr,
                )
                process.send_signal(signal.SIGTERM)
            else:
                reason.touch()  # so that ranks print no errors for the user's own interrupt
                process.kill()
    if signals.count(signal.SIGINT) > 1:
        return 128 + signal.SIGINT
    if code >= 0:
        return code
    if signals and -code in STOP_SIGNALS:  # it came before the process had set its handlers
        return ExitCode.STOPPED
    if not is_explained(reason, code):
        print(
            f"megavlm: the launcher of the ranks ended with {signal.Signals(-code).name}: start "
            "the run again",
            file=sys.stderr,
        )
    return 128 - code


def _sweep(before: set[int]) -> None:
    """End all descendants, except the children in `before` and their descendants. They are killed
    only after LEAVE seconds, because reapers of servers first remove the servers' files
    (server_main.py).
    """
    deadline = time.monotonic() + LEAVE
    while True:
        roots = [child for child in psutil.Process().children() if child.pid not in before]
        if not roots:
            return
        if (left := deadline - time.monotonic()) > 0:
            psutil.wait_procs(roots, timeout=left)
            continue
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
        psutil.wait_procs(roots)  # reaps them; this ends, because SIGKILL cannot be ignored


def _agent(parent: str, *arguments: str) -> int:
    """Run torchrun without its banner. Returns the exit code of the first worker that failed."""
    die_with(int(parent))
    os.environ[AGENT_PID] = str(os.getpid())
    for number in STOP_SIGNALS:
        signal.signal(number, _forward)
    with loading_packages():
        from torch.distributed import DistNetworkError, DistStoreError, TCPStore, run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # only torchrun logs in this process
    options = run.parse_args(list(arguments))
    # On any other signal, torchrun would kill the ranks after 30 s, in the middle of a step.
    options.signals_to_handle = "SIGINT,SIGQUIT"
    if options.master_port == 0:
        # torchrun's own would listen to every machine, and with --standalone runs what is sent to
        # it. A store that is there is shared with all in this process.
        listener = socket.create_server((LOOPBACK, 0))
        options.master_port = listener.getsockname()[1]
        store = TCPStore(  # noqa: F841  it ends with this process
            LOOPBACK,
            options.master_port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    try:
        run.run(options)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except (DistNetworkError, DistStoreError) as error:
        print(
            f"megavlm: the nodes of the run do not meet at {options.master_addr}:"
            f"{options.master_port} ({str(error).splitlines()[0]}): start all of them, with an "
            "address that each reaches and a port of the first that nothing else uses (--master, "
            "or ROLLOUT_PORT of a Slurm job)",
            file=sys.stderr,
        )
        return ExitCode.TRANSIENT
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = int(failure.exitcode)
        if -code in STOP_SIGNALS:  # the signal came before the rank's handler was set
            return ExitCode.STOPPED
        if not is_explained(Path(os.environ[REASON_FILE]), code):
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            print(f"megavlm: rank {rank} ended with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


def is_explained(reason: Path, code: int) -> bool:
    """Return True if a rank has reported why the run ends, so that nothing more need be printed. A
    rank that only stopped, because torchrun stops all ranks when one fails, does not explain the
    failure.
    """
    if not reason.exists():
        return False
    return reason.read_text() != str(int(ExitCode.STOPPED)) or code == ExitCode.STOPPED


def _forward(number: int, _: FrameType | None) -> None:
    """Forward a signal to the ranks, the children of this process."""
    ranks = psutil.Process().children()
    if not ranks:
        os._exit(ExitCode.STOPPED)
    for rank in ranks:
        try:
            rank.send_signal(number)
        except psutil.NoSuchProcess:
            pass


if __name__ == "__main__":
    # Python resets signal handlers while it shuts down, so a signal then would change the exit
    # code.
    leave(_agent(*sys.argv[1:]))

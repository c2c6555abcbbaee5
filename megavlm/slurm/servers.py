"""Rollout servers of one node of a Slurm job.

    python -m megavlm.slurm.servers RUN_DIR HOST PORT COUNT GPUS [SGLang's arguments]

runs COUNT servers on GPUS GPUs each, on ports from PORT upwards. The servers' keys are taken from
the environment, and their logs are written to RUN_DIR. A server that dies, or cannot be started, is
restarted after a pause, and the trainer sends it the weights again. The servers end with this
process, and SIGUSR2 ends this process. Other signals are ignored: Slurm sends them to every process
of a job, but the trainer still needs its servers to finish the step. The servers also end after the
trainer's watchdog has requested their stacks.

To run a server over several nodes, this command runs on each of them with COUNT 1 and SGLang's
--nnodes, --node-rank and --dist-init-addr. When the server's process on one node ends, the
processes on the other nodes would wait for it in a collective, so all end and start again. A file
in RUN_DIR tells the nodes: it has one byte for each launch of the server that has ended. Every node
that sees launch n end writes byte n, so that no write can undo the write of another node.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from megavlm.inference.server_process import ADMIN_KEY, API_KEY, ServerProcess
from megavlm.process import STACKS, STACKS_WANTED, STOP_SIGNALS

TICK = 0.5  # seconds between checks of the servers
LONGEST_PAUSE = 60.0  # longest pause before a restart in seconds; the first takes one second
FOR_ALL = 5.0  # seconds within which all nodes see the request for stacks
FOR_STACKS = 20.0  # seconds that servers have to write their stacks


@dataclass
class Restarts:
    """A server's process on this node, the time at which it may start again, and the pause after
    its next end [s].

    ended: for a server over several nodes, the file that counts launches that have ended. launch:
    number of the current launch.
    """

    server: ServerProcess
    ended: Path | None = None
    launch: int = 0
    due: float = 0.0
    pause: float = 1.0

    def look(self) -> None:
        """Start the process if it does not run and its pause is over, end it if its launch has
        ended on another node, and limit the size of its log.
        """
        if time.monotonic() >= self.due:
            try:
                self._look()
            except OSError as error:  # the other servers of the node continue
                self._postpone(
                    f"the SGLang server on port {self.server.port} could not be started or "
                    f"stopped: {error}"
                )

    def _look(self) -> None:
        server, launch = self.server, self._current_launch()
        if not server.running:
            self.launch = launch
            server.launch()
        elif launch > self.launch:
            self._postpone(f"the SGLang server on port {server.port} ended on another of its nodes")
            server.stop()
        elif reason := server.death():
            self._postpone(reason)
            self._end_launch()
            server.stop()
        else:
            server.rotate_log()

    def _current_launch(self) -> int:
        """Return the number of launches that have ended on any node."""
        return self.launch if self.ended is None else max(self.launch, len(_content(self.ended)))

    def _end_launch(self) -> None:
        if self.ended is not None:
            file = os.open(self.ended, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, b".", self.launch)
            finally:
                os.close(file)

    def _postpone(self, reason: str) -> None:
        print(f"megavlm: {reason}\nit starts again in {self.pause:g} s", file=sys.stderr)
        self.due = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


def main() -> None:
    run_dir, host, port, count, gpus = sys.argv[1:6]
    asked: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: asked.append(number))
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # the servers would inherit SIG_IGN
    keys = os.environ.pop(API_KEY), os.environ.pop(ADMIN_KEY)
    arguments = sys.argv[6:]
    wanted = Path(run_dir, STACKS, STACKS_WANTED)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_bytes(b"")
    ended = None
    if "--dist-init-addr" in arguments:
        address = arguments[arguments.index("--dist-init-addr") + 1]
        ended = Path(run_dir, f"rollout_server_{address.replace(':', '_')}.ended")
        ended.touch()  # now, as other nodes may see a new file late on a network file system
    restarts = [
        Restarts(
            ServerProcess(
                host,
                int(port) + index,
                [*arguments, "--base-gpu-id", str(int(gpus) * index)],
                os.environ,
                keys,
                Path(run_dir, f"rollout_server_{host}_{index}.log"),
                stop_timeout=0,  # kill at once: Slurm takes the node back
            ),
            ended,
        )
        for index in range(int(count))
    ]
    with ExitStack() as stack:  # all are stopped, even if one of them cannot be
        for each in restarts:
            stack.callback(each.server.stop)
        while not asked and not _content(wanted):
            for each in restarts:
                each.look()
            time.sleep(TICK)
        if _content(wanted):
            write_stacks([each.server for each in restarts])


def write_stacks(servers: list[ServerProcess]) -> None:
    """Have the servers write the stacks of their threads to their logs, and end.

    First the servers on all nodes are suspended, because SGLang's processes end without writing
    stacks when processes on another node end.
    """
    for server in servers:
        server.suspend()
    time.sleep(FOR_ALL)
    for server in servers:
        server.abort()
    deadline = time.monotonic() + FOR_STACKS
    while time.monotonic() < deadline and any(
        server.running and server.death() is None for server in servers
    ):
        time.sleep(TICK)


def _content(file: Path) -> bytes:
    """Return a file's content, or b"" if it cannot be read. The file is opened each time, because
    network file systems only check for changes when a file is opened.
    """
    with suppress(OSError):
        return file.read_bytes()
    return b""


if __name__ == "__main__":
    main()

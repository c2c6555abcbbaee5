"""Rollout servers of one node of a Slurm job.

    python -m megavlm.slurm.servers RUN_DIR HOST PORT COUNT GPUS [SGLang's arguments]

runs COUNT servers on GPUS GPUs each, at ports from PORT on, with the keys in the environment and
their logs in RUN_DIR. A server that dies, or cannot be started, is started again after a pause; the
trainer gives it the weights anew. They end with this process, which SIGUSR2 ends: Slurm sends the
other signals to every process of a job, and the trainer still needs its servers to finish the step.
They also end once the watchdog of the trainer wants their stacks.

A server over several nodes is run so on each of them, with COUNT 1 and SGLang's --nnodes,
--node-rank and --dist-init-addr. When its process on one node ends, those on the others would wait
for it in a collective, so all end and start again: a file in RUN_DIR has a byte for each launch of
such a server that has ended. Byte n is written by every node that sees launch n end, which never
takes back what another wrote.
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

TICK = 0.5  # seconds between looks at the servers
LONGEST_PAUSE = 60.0  # seconds before a restart; the first pause takes one
FOR_ALL = 5.0  # seconds in which the supervisors of all nodes see that stacks are wanted
FOR_STACKS = 20.0  # seconds in which servers write their stacks


@dataclass
class Restarts:
    """A server's process on this node, the time at which it may start again, and the pause after
    its next end [s].

    ended: file of the launches that have ended, of a server over several nodes. launch: number of
    the launch that runs.
    """

    server: ServerProcess
    ended: Path | None = None
    launch: int = 0
    due: float = 0.0
    pause: float = 1.0

    def look(self) -> None:
        """Start the process if it does not run and that is due, end it if it has ended on another
        node, and bound its log.
        """
        if time.monotonic() >= self.due:
            try:
                self._look()
            except OSError as error:  # the node's other servers go on
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
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the servers
    keys = os.environ.pop(API_KEY), os.environ.pop(ADMIN_KEY)
    arguments = sys.argv[6:]
    wanted = Path(run_dir, STACKS, STACKS_WANTED)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_bytes(b"")
    ended = None
    if "--dist-init-addr" in arguments:
        address = arguments[arguments.index("--dist-init-addr") + 1]
        ended = Path(run_dir, f"rollout_server_{address.replace(':', '_')}.ended")
        ended.touch()  # early: network file systems may take long to see a file that was not there
    restarts = [
        Restarts(
            ServerProcess(
                host,
                int(port) + index,
                [*arguments, "--base-gpu-id", str(int(gpus) * index)],
                os.environ,
                keys,
                Path(run_dir, f"rollout_server_{host}_{index}.log"),
                stop_timeout=0,  # the node is given back
            ),
            ended,
        )
        for index in range(int(count))
    ]
    with ExitStack() as stack:  # one that cannot be stopped keeps no other
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

    They are suspended until those of all nodes are, because SGLang's processes end without stacks
    when those on another node end.
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
    """Return a file's content, b"" if it cannot be read. It is opened each time, because network
    file systems look for changes only then.
    """
    with suppress(OSError):
        return file.read_bytes()
    return b""


if __name__ == "__main__":
    main()

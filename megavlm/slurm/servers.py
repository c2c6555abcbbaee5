"""Rollout servers of one node of a Slurm job.

    python -m megavlm.slurm.servers RUN_DIR HOST PORT COUNT GPUS [SGLang's arguments]

runs COUNT servers on GPUS GPUs each, at ports from PORT on, with the keys in the environment and
their logs in RUN_DIR. A server that dies, or cannot be started, is started again after a pause; the
trainer gives it the weights anew. They end with this process, which SIGUSR2 ends: Slurm sends the
other signals to every process of a job, and the trainer still needs its servers to finish the step.
They also end once the watchdog of the trainer wants their stacks.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megavlm.inference.server_process import ADMIN_KEY, API_KEY, ServerProcess
from megavlm.signals import STACKS, STACKS_WANTED, STOP_SIGNALS

TICK = 0.5  # seconds between looks at the servers
LONGEST_PAUSE = 60.0  # seconds before a restart; the first pause takes one
FOR_STACKS = 20.0  # seconds in which servers write their stacks


@dataclass
class Restarts:
    """A server, the time at which it may start again, and the pause after its next death [s]."""

    server: ServerProcess
    due: float = 0.0
    pause: float = 1.0

    def look(self) -> None:
        """Start the server if it does not run and that is due, and bound its log."""
        server = self.server
        if not server.running:
            if time.monotonic() >= self.due:
                try:
                    server.launch()
                except OSError as error:  # the node's other servers go on
                    self._postpone(
                        f"the SGLang server on port {server.port} did not start: {error}"
                    )
        elif reason := server.death():
            self._postpone(reason)
            server.stop()
        else:
            server.rotate_log()

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
    restarts = [
        Restarts(
            ServerProcess(
                host,
                int(port) + index,
                [*sys.argv[6:], "--base-gpu-id", str(int(gpus) * index)],
                os.environ,
                keys,
                Path(run_dir, f"rollout_server_{host}_{index}.log"),
                stop_timeout=0,  # the node is given back
            )
        )
        for index in range(int(count))
    ]
    wanted = Path(run_dir, STACKS, STACKS_WANTED)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_bytes(b"")
    try:
        while not asked and not _has_content(wanted):
            for each in restarts:
                each.look()
            time.sleep(TICK)
        if _has_content(wanted):
            write_stacks([each.server for each in restarts])
    finally:
        for each in restarts:
            each.server.stop()


def write_stacks(servers: list[ServerProcess]) -> None:
    """Have the servers write the stacks of their threads to their logs, and end."""
    for server in servers:
        server.abort()
    deadline = time.monotonic() + FOR_STACKS
    while time.monotonic() < deadline and any(
        server.running and server.death() is None for server in servers
    ):
        time.sleep(TICK)


def _has_content(file: Path) -> bool:
    """Return True if the file has content. It is opened each time, because network file systems
    look for changes only then.
    """
    with suppress(OSError):
        return bool(file.read_bytes())
    return False


if __name__ == "__main__":
    main()

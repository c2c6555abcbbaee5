"""Requests to processes of a run: signals to stop, and a file that asks for stacks."""

import signal
from types import FrameType

# A preemption, Slurm's warning before the time limit, and the end of a terminal.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Folder in the run directory that the watchdog writes stacks to, and a file in it: when that is not
# empty, servers on the rollout nodes of a Slurm job write theirs to their logs.
STACKS, STACKS_WANTED = "stacks", "wanted_of_servers"


class Stopped(BaseException):
    """A request to stop where there is no step to finish. Not an Exception: it passes through
    handlers of errors, as KeyboardInterrupt does.
    """


def stop_at_once() -> None:
    """Raise Stopped in the main thread upon a request to stop, from now on."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def leave_to_parent() -> None:
    """Ignore Ctrl-C and requests to stop: the parent process handles them and ends this one."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)

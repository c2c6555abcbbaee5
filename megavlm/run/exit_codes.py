"""Exit codes of a run, by which a batch script decides whether to start it again.

The values are those of BSD's sysexits.h where one fits. A rank that is killed by signal n ends the
run with 128 + n, as in a shell.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Ends of a run. The same command goes on from the last checkpoint in every case."""

    DONE = 0
    FAULT = 1  # an error of the program: it shows a traceback
    USER_ERROR = 2  # a recipe, file or option is wrong: starting it again changes nothing
    TRANSIENT = 69  # servers, another rank, the network or the file system failed
    NOT_FINITE = 70  # too many updates in a row had gradients that are not finite
    HUNG = 71  # no rank made progress, see parallel/watchdog.py: start it again
    STOPPED = 75  # stopped on request, or by its time limit, with a checkpoint: start it again

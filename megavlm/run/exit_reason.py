"""The reason for the end of a run: one sentence on stderr, from the first rank that finds one."""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import psutil

from megavlm.config.schema import Config
from megavlm.process import ExitCode, leave
from megavlm.run.launcher import AGENT_PID, REASON_FILE

PATIENCE = 5.0  # seconds that a rank waits for a lost peer to report the reason
NOTICED = 2.0  # seconds for torchrun to notice the first rank that ended, before this one ends, too


def end_run(sentence: str, code: ExitCode) -> NoReturn:
    """End this rank. Print why, unless another rank on this machine has already printed a
    reason.
    """
    if claim_reason(code):
        print(f"megavlm: {sentence}", file=sys.stderr)
    leave(code)


def claim_reason(code: ExitCode) -> bool:
    """Return True on the first rank that calls this. Its exit code becomes the run's."""
    if REASON_FILE not in os.environ:
        return os.environ["RANK"] == "0"
    try:
        with open(os.environ[REASON_FILE], "x") as file:
            file.write(str(int(code)))
            return True
    except FileExistsError:
        return False


def reason_given() -> int | None:
    """Return the exit code of a peer that reports within PATIENCE seconds why the run ends; this
    rank's error is then only a consequence. If a peer on this machine has ended without a report,
    return TRANSIENT; the launcher reports that peer. Returns None if no peer has failed.
    """
    deadline = time.monotonic() + PATIENCE
    while REASON_FILE in os.environ and time.monotonic() < deadline:
        if os.path.exists(os.environ[REASON_FILE]):
            return int(Path(os.environ[REASON_FILE]).read_text() or 130)  # empty: Ctrl-C
        if _lost_peer():
            time.sleep(NOTICED)
            return ExitCode.TRANSIENT
        time.sleep(0.05)
    return None


def _lost_peer() -> bool:
    """Return True if another rank on this machine has ended."""
    ranks = psutil.Process(int(os.environ[AGENT_PID])).children()
    alive = [rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE]
    return len(alive) < int(os.environ["LOCAL_WORLD_SIZE"])


def keep_traceback(config: Config) -> str:
    """Write the traceback to RUN_DIR/error.txt. Returns text with its path to append to the error
    message.
    """
    path = Path(config.run.dir, "error.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return ""
    return f" (traceback: {path})"

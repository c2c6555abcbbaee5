"""The reason for the end of a run: one sentence on stderr, from the first rank that finds one."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megavlm.config.schema import Config
from megavlm.process import ExitCode, leave
from megavlm.run.launcher import AGENT_PID, REASON_FILE
from megavlm.writing import write_whole

PATIENCE = 5.0  # seconds that a rank waits for a lost peer to report the reason
CODE_KEY = "megavlm/exit_code"  # in the store by which the nodes of a run have met
NOTICED = 2.0  # seconds for torchrun to notice the first rank that ended, before this one ends, too


def end_run(sentence: str, code: ExitCode) -> NoReturn:
    """End this rank. Print why, unless another rank on this machine has already printed a
    reason.
    """
    if claim_reason(code):
        print(f"megavlm: {sentence}", file=sys.stderr)
    leave(code)


def claim_reason(code: ExitCode) -> bool:
    """Return True on the first rank of this machine that calls this. Its exit code becomes the
    run's.
    """
    # A rank that stops may do so because another failed, see is_explained.
    if code != ExitCode.STOPPED:
        _ask_store(lambda store: store.set(CODE_KEY, str(int(code))))
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


def is_of_lost_node(error: RuntimeError) -> bool:
    """Return True if a run on several nodes has lost the connection to a rank. Gloo raises plain
    RuntimeErrors.
    """
    from torch.distributed import DistError  # late: torch takes seconds, and is there by now

    return _has_nodes() and (isinstance(error, DistError) or "/gloo/transport/" in str(error))


def end_with_lost_node(config: Config) -> NoReturn:
    """End this rank, which has lost the connection to a rank of another node. Its exit code is the
    one that a rank there has reported, or TRANSIENT.
    """
    codes: list[int] = []

    def read(store: Any) -> None:
        if store.check([CODE_KEY]):
            codes.append(int(store.get(CODE_KEY)))

    _ask_store(read)
    sentence = (
        "a rank of another node has ended or cannot be reached: the output of its node says why"
    )
    if codes:
        end_run(sentence, ExitCode(codes[0]))
    end_run(sentence + keep_traceback(config), ExitCode.TRANSIENT)


def _ask_store(ask: Callable[[Any], None]) -> None:
    """Call `ask` with the store by which the ranks of several nodes have met, if they have, and
    wait for it for at most PATIENCE seconds. The store does not answer if its node is cut off, or
    while another thread of this rank waits for a key.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if not _has_nodes() or dist is None or not dist.is_initialized():
        return

    def work() -> None:
        with suppress(RuntimeError):  # the store's node is lost
            ask(dist.distributed_c10d._get_default_store())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)


def _has_nodes() -> bool:
    """Return True if the run has ranks on other machines."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]


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
        write_whole(path, traceback.format_exc().encode())  # several ranks may write it
    except OSError:
        return ""
    return f" (traceback: {path})"

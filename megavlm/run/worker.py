"""One rank of a run: the training program, and how it ends.

Bad input that only shows here (a server that does not start, an answer that cannot be used) is one
sentence on stderr and exit code 2, from the first rank that meets it; the ranks that lose
their peer because of it are silent.
"""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Literal, NoReturn

from megavlm.config.schema import Config
from megavlm.inference.errors import RolloutRequestError, RolloutServerError, WeightSyncError
from megavlm.rewards.base import RewardStop
from megavlm.run.launcher import AGENT_PID, REASON_FILE, die_with

PATIENCE = 5.0  # seconds that a rank which lost its peers waits for one of them to say why


def run(phase: Literal["train", "evaluate"], config: Config) -> None:
    """`megavlm.run.main`'s function of that name on this rank; returns when it succeeded.

    Every other end leaves the process at once: interpreter shutdown with process groups open can
    abort and would hide the exit code.
    """
    if AGENT_PID in os.environ:
        die_with(int(os.environ[AGENT_PID]))
    try:
        if AGENT_PID not in os.environ and os.environ["RANK"] == "0":
            from megavlm.run import preflight

            preflight.check(config, world_size=int(os.environ["WORLD_SIZE"]), phase=phase)
        from megavlm.run.main import evaluate, train

        {"train": train, "evaluate": evaluate}[phase](config)
    except KeyboardInterrupt:
        _leave(130)
    except (
        ValueError,
        RolloutServerError,
        RolloutRequestError,
        WeightSyncError,
        RewardStop,
    ) as error:
        _explain(error, config)
    except RuntimeError as error:
        from megavlm.checkpointing.together import CheckpointError  # not before the platform

        if isinstance(error, CheckpointError):
            _explain(error, config)
        if _reason_given():
            _leave(2)
        raise


def _explain(error: Exception, config: Config) -> NoReturn:
    if _claim_reason():
        print(f"megavlm: {error}{_keep_traceback(config)}", file=sys.stderr)
    _leave(2)


def _claim_reason() -> bool:
    """True for the first rank that asks."""
    if REASON_FILE not in os.environ:
        return os.environ["RANK"] == "0"
    try:
        with open(os.environ[REASON_FILE], "x"):
            return True
    except FileExistsError:
        return False


def _reason_given() -> bool:
    """Whether a peer has told, or tells soon, why the run ends: then our error only follows."""
    deadline = time.monotonic() + PATIENCE
    while REASON_FILE in os.environ and time.monotonic() < deadline:
        if os.path.exists(os.environ[REASON_FILE]):
            return True
        time.sleep(0.05)
    return False


def _keep_traceback(config: Config) -> str:
    """Where the traceback was written, for the end of the sentence: this may be a fault of ours."""
    path = Path(config.run.dir, "error.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return ""
    return f" (traceback: {path})"


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

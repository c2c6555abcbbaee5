"""One rank of a run: the training program and its exit code.

Bad input that is only found here (a server that does not start, a reply that cannot be used) is
reported as one sentence on stderr with exit code 2, by the first rank that finds it. Ranks that
fail because they lost that peer print nothing.
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

PATIENCE = 5.0  # seconds that a rank which lost a peer waits for that peer to report the reason


def run(phase: Literal["train", "evaluate"], config: Config) -> None:
    """Run `megavlm.run.main`'s function named `phase` on this rank. Returns if it succeeds.

    Otherwise the process exits at once: interpreter shutdown with open process groups can abort,
    which would hide the exit code.
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
        # Imports megatron-core, so not before the platform is installed.
        from megavlm.checkpointing.all_ranks import CheckpointError

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
    """Return True on the first rank that calls this."""
    if REASON_FILE not in os.environ:
        return os.environ["RANK"] == "0"
    try:
        with open(os.environ[REASON_FILE], "x"):
            return True
    except FileExistsError:
        return False


def _reason_given() -> bool:
    """Return True if a peer reports within PATIENCE why the run ends: this error is a result."""
    deadline = time.monotonic() + PATIENCE
    while REASON_FILE in os.environ and time.monotonic() < deadline:
        if os.path.exists(os.environ[REASON_FILE]):
            return True
        time.sleep(0.05)
    return False


def _keep_traceback(config: Config) -> str:
    """Write the traceback to RUN_DIR/error.txt. Returns the end of the error's sentence."""
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

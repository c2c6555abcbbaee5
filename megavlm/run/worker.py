"""One rank of a run: preparation, the command's work, and the exit code.

Errors that a user can fix or retry (bad input that is only found here, lost servers, a full disk)
are reported as one sentence on stderr, by the first rank that finds them. Ranks that fail because
they lost that peer print nothing and end with its exit code.
"""

import os
import warnings
from typing import TYPE_CHECKING, NoReturn

import psutil

from megavlm.config.schema import Config
from megavlm.inference.errors import RolloutRequestError, RolloutServerError, WeightSyncError
from megavlm.observability.progress import Progress
from megavlm.parallel import platform
from megavlm.process import (
    CheckpointError,
    ExitCode,
    NotFiniteError,
    Stopped,
    die_with,
    leave,
    loading_packages,
    stop_at_once,
    stop_deferred,
)
from megavlm.rewards.base import RewardStop
from megavlm.run.exit_reason import (
    claim_reason,
    end_run,
    end_with_lost_node,
    is_of_lost_node,
    keep_traceback,
    reason_given,
)
from megavlm.run.launcher import AGENT_PID

if TYPE_CHECKING:
    from megavlm.run.checks.preflight import Phase


def run(phase: "Phase", config: Config) -> NoReturn:
    """Run the command on this rank and end the process. Training uses all ranks; evaluation and
    rollouts use rank 0 only. Errors that are not the user's fault are raised.
    """
    if AGENT_PID in os.environ:
        die_with(int(os.environ[AGENT_PID]))
    is_first = os.environ["RANK"] == "0"
    started = psutil.Process(int(os.environ.get(AGENT_PID, os.getpid()))).create_time()
    stop_at_once()
    try:
        try:
            with Progress(started=started, is_quiet=not is_first) as progress:
                is_complete = _work(phase, config, progress, is_first=is_first)
        except (ValueError, RewardStop) as error:
            _explain(error, ExitCode.USER_ERROR, config)
        except (RolloutServerError, RolloutRequestError, WeightSyncError, OSError) as error:
            _explain(error, ExitCode.TRANSIENT, config)
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                _explain(error, ExitCode.TRANSIENT, config)
            if isinstance(error, NotFiniteError):
                _explain(error, ExitCode.NOT_FINITE, config)
            if (code := reason_given()) is not None:
                leave(code)
            if is_of_lost_node(error):
                end_with_lost_node(config)
            raise
    # It may also come while an error is reported, when torchrun stops this rank because another
    # failed.
    except KeyboardInterrupt:
        leave(130)
    except Stopped:
        is_complete = False
    if not is_complete:
        claim_reason(ExitCode.STOPPED)
    leave(ExitCode.DONE if is_complete else ExitCode.STOPPED)


def _work(phase: "Phase", config: Config, progress: Progress, *, is_first: bool) -> bool:
    """Run the command. Returns False if the run stopped before its last step, by a stop request."""
    if AGENT_PID not in os.environ and is_first:
        from megavlm.run.checks import preflight

        progress.begin("checking the recipe")
        preflight.check(config, world_size=int(os.environ["WORLD_SIZE"]), phase=phase)
    progress.begin("loading packages")
    with stop_deferred(), loading_packages():
        _prepare()
        from megavlm.run.evaluate import evaluate_models
        from megavlm.run.rollout import record_rollouts
        from megavlm.run.train import train
    if phase == "train":
        return train(config, progress)
    if is_first and phase == "evaluate":
        evaluate_models(config, progress)
    elif is_first:
        record_rollouts(config, progress)
    return True


def _prepare() -> None:
    """Install the platform. Call it before the first import of megatron-core."""
    # megatron-core warns on each rank and step about optional kernels and deprecated torch names.
    warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed|torch\.nn)\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    platform.install()


def _explain(error: Exception, code: ExitCode, config: Config) -> NoReturn:
    # torchrun stops this rank as soon as another has failed; the report is still written whole.
    with stop_deferred():
        end_run(f"{error}{keep_traceback(config)}", code)

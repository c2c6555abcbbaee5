"""How a rank starts and ends: with the packages it needs, and with one sentence for what a user can
mend.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megavlm.process import ExitCode

CODE = """
import os, signal, sys
from megavlm.config.load import load
from megavlm.parallel import platform
from megavlm.run import worker

platform.install()
from megavlm.process import CheckpointError
from megavlm.rewards.base import RewardStop
from megavlm.inference.errors import RolloutRequestError, WeightSyncError
from megavlm.run import train
from megavlm.run.checks import preflight
from megavlm.process import NotFiniteError

heavy = {"matplotlib", "scipy.stats", "sglang", "torch._dynamo"} & set(sys.modules)
assert not heavy, f"each rank would load these: {heavy}"

def fail(config, progress):
    raise error("the disk is full")

preflight.check = lambda *args, **kwargs: None
train.train = fail
os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
config = load(sys.argv[1])
for error in (
    CheckpointError, OSError, RolloutRequestError, WeightSyncError, ValueError, RewardStop,
    NotFiniteError,
):
    if os.fork() == 0:
        worker.run("train", config)
    print(error.__name__, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)

class Untimely(RuntimeError):
    "torchrun stops this rank while it finds out what its error is: another one has failed."

    @property
    def __class__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return RuntimeError

error = lambda _: Untimely()
worker.run("train", config)
"""


def test_what_a_user_can_mend_is_one_sentence(write_recipe: Callable[..., Path]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(write_recipe())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.STOPPED, done.stderr
    lines = done.stderr.splitlines()
    assert all(told.startswith("megavlm: the disk is full (traceback: ") for told in lines[::2]), (
        done.stderr
    )
    codes = {name: ExitCode(int(code)) for name, code in map(str.split, lines[1::2])}
    assert codes == {
        "CheckpointError": ExitCode.TRANSIENT,
        "OSError": ExitCode.TRANSIENT,
        "RolloutRequestError": ExitCode.TRANSIENT,
        "WeightSyncError": ExitCode.TRANSIENT,
        "ValueError": ExitCode.USER_ERROR,
        "RewardStop": ExitCode.USER_ERROR,
        "NotFiniteError": ExitCode.NOT_FINITE,
    }

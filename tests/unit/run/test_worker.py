"""How a rank starts and ends: with the packages it needs, and with one sentence for what a user can
mend.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CODE = """
import os, sys
from megavlm.config.load import load
from megavlm.parallel import platform
from megavlm.run import worker

platform.install()
from megavlm.checkpointing.all_ranks import CheckpointError
from megavlm.rewards.base import RewardStop
from megavlm.inference.errors import RolloutRequestError, WeightSyncError
from megavlm.run import preflight, train

heavy = {"matplotlib", "scipy.stats", "sglang", "torch._dynamo"} & set(sys.modules)
assert not heavy, f"each rank would load these: {heavy}"

def fail(config, progress):
    raise error("the disk is full")

preflight.check = lambda *args, **kwargs: None
train.train = fail
os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
config = load(sys.argv[1])
for error in (CheckpointError, ValueError, RolloutRequestError, WeightSyncError, RewardStop):
    if os.fork() == 0:
        worker.run("train", config)
    print(error.__name__, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def test_what_a_user_can_mend_is_one_sentence(write_recipe: Callable[..., Path]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(write_recipe())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * 5, done.stderr
    for told, code in zip(lines[::2], lines[1::2], strict=True):
        assert told.startswith("megavlm: the disk is full (traceback: ") and code.endswith(" 2")

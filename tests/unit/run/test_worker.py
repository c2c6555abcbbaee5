"""How a rank ends: one sentence for what a user can mend."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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

def fail(config, progress):
    raise {error}

preflight.check = lambda *args, **kwargs: None
train.train = fail
os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
worker.run("train", load(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "error",
    ["CheckpointError", "ValueError", "RolloutRequestError", "WeightSyncError", "RewardStop"],
)
def test_what_a_user_can_mend_is_one_sentence(
    write_recipe: Callable[..., Path], error: str
) -> None:
    code = CODE.format(error=f"{error}('the disk is full')")
    command = [sys.executable, "-W", "ignore", "-c", code, str(write_recipe())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("megavlm: the disk is full (traceback: ")

"""`megavlm doctor` as a user runs it on a machine without GPUs: the real server, and a sync."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.demo.tiny_model import make_tiny_model
from tests.support.cache import cached_folder
from tests.support.forked import forking
from tests.unit.run.test_doctor import outcome


@pytest.mark.slow
@pytest.mark.xdist_group("sglang")
def test_a_machine_without_gpus_and_a_recipe(write_recipe: Callable[..., Path]) -> None:
    model = cached_folder("cli-model", "", lambda path: make_tiny_model(path, ["red"] * 9, seed=0))
    recipe = write_recipe(model={"folder": str(model)}, rollout={"sync": "distributed"})
    command = [sys.executable, "-m", "megavlm", "doctor", str(recipe), "--cpu"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with forking():
        reply = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = outcome(reply.stdout)
    names = {"recipe", "memory", "gloo collective", "attention sdpa", "server", "sync"}
    assert names <= found.keys(), reply.stderr
    assert {found[name] for name in names} == {"OK"}, reply.stdout
    assert reply.returncode == int("FAIL" in found.values())

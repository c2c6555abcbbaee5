"""Supervised runs through the command line: learning, and resuming bit for bit."""

import torch

from megavlm.checkpointing.folder import latest_step, step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.run.run_lock import run_lock
from tests.e2e.conftest import World

TRAINED_TOWER = {"freeze_tower": False, "freeze_merger": False}
SFT = {"name": "sft", "batch_size": 8}


def test_stopped_and_resumed_equals_uninterrupted(world: World) -> None:
    sections = {
        "model": TRAINED_TOWER,
        "parallel": {"data": 2},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine"},
    }
    whole = world.recipe("whole", algorithm={**SFT, "steps": 4}, **sections)
    parts = world.recipe(
        "parts", algorithm={**SFT, "steps": 4}, checkpoint={"every": 2}, **sections
    )
    assert world.megavlm("train", whole).returncode == 0
    assert world.megavlm("train", parts).returncode == 0
    # Back to where step 2 was saved, as if the run had been killed after it.
    folder = world.root / "parts/checkpoints"
    (folder / "latest").unlink()
    for path in sorted(step_folder(folder, 4).iterdir()):
        path.unlink()
    step_folder(folder, 4).rmdir()
    assert latest_step(folder) == 2
    with run_lock(world.root / "parts"):
        second = world.megavlm("train", parts)
    assert second.returncode == 2 and "is in use by process" in second.stderr
    resumed = world.megavlm("train", parts)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("does not name a complete step") == 1, "one warning, of one rank"

    one = StepReader(step_folder(world.root / "whole/checkpoints", 4))
    other = StepReader(step_folder(folder, 4))
    assert set(one.tensors) == set(other.tensors)
    for key in one.tensors:
        assert torch.equal(one.read(key), other.read(key)), key
    losses = [[step["loss"] for step in world.metrics(name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]

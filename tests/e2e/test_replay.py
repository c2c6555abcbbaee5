"""A run that records its rollouts, and replays of them without a server."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.inference.server_process import API_KEY
from megavlm.inference.teacher import API_KEY as TEACHER_KEY
from tests.e2e.conftest import Running, World

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("runs")]

GRPO = {
    "name": "grpo",
    "steps": 4,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "minibatches": 2,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
    "kl_coefficient": 0.01,
}
SECTIONS: dict[str, Any] = {
    "algorithm": GRPO,
    "optimizer": {"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine"},
    "checkpoint": {"every": 2, "keep_last": None, "export_hf": False},
}
OF_TRAINING = (
    "seconds/", "sync_", "skipped_bad", "skipped_long", "time", "tokens_per_second",
    "flops_per_second", "mfu", "modelled/", "trainer_idle_share", "image_bytes_sent", "images_",
)  # fmt: skip


def weights(folder: Path, step: int = GRPO["steps"]) -> dict[str, torch.Tensor]:
    reader = StepReader(step_folder(folder / "checkpoints", step))
    return {key: reader.read(key) for key in reader.tensors if key.startswith("language_model.")}


def values(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not re.match("|".join((*OF_TRAINING, "memory")), k)}


@pytest.fixture(scope="module")
def recorded(world: World, running: Running) -> Path:
    """The run directory of a run that stopped after two steps and resumed."""
    recipe = world.recipe(
        "recorded",
        **SECTIONS,
        run={"record_rollouts": True},
        rollout=running.rollout | {"top_p": 0.9, "top_k": 100},
    )
    for more in ([], ["run.summary=false"]):
        done = world.megavlm("train", recipe, *more, **running.keys)
        assert done.returncode == 0, done.stderr
        if not more:  # as if it had been killed while it trained on step 3
            shutil.rmtree(step_folder(world.root / "recorded/checkpoints", 4))
    folder = world.root / "recorded"
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == [f"step_00000{step}.safetensors" for step in (1, 2, 3, 4)]
    return folder


def replay(world: World, recorded: Path, name: str, **sections: Any) -> str:
    """Replay the recorded run in a run directory `name`. Returns what is printed."""
    recipe = world.recipe(
        name, **SECTIONS, rollout={"replay": str(recorded / "rollouts")}, **sections
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    assert not list((world.root / name).glob("rollout_server*"))
    return done.stdout


@pytest.fixture(scope="module")
def on_two_ranks(world: World, recorded: Path) -> Path:
    """The run directory of a replay on two ranks."""
    replay(world, recorded, "replayed_on_two", parallel={"tensor": 2})
    return world.root / "replayed_on_two"


@pytest.mark.slow
def test_a_replay_is_the_run_again(world: World, recorded: Path) -> None:
    """To the last bit of the weights and of each step's metrics."""
    replay(world, recorded, "replayed")
    before, after = weights(recorded), weights(world.root / "replayed")
    assert before.keys() == after.keys() and len(before) > 5
    assert all(torch.equal(before[key], after[key]) for key in before)
    ours, theirs = world.metrics("replayed"), world.metrics("recorded")
    assert [values(record) for record in ours] == [values(record) for record in theirs]
    assert "seconds/reward" not in ours[0] and "kl_reference" in ours[0]
    assert ours[1]["gradient_norm"] > 0
    assert 1 < ours[0]["kept_tokens"] <= 100 and ours[0]["rollout_max_difference"] < 1e-5


@pytest.mark.slow
def test_a_replay_on_other_ranks(world: World, recorded: Path, on_two_ranks: Path) -> None:
    before, after = weights(recorded), weights(on_two_ranks)
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=1e-3, atol=1e-4)
    ours, theirs = world.metrics("replayed_on_two"), world.metrics("recorded")
    for one, other in zip(ours, theirs, strict=True):
        assert one["reward"] == other["reward"]
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


@pytest.mark.slow
def test_rollouts_without_a_trainer_are_trained_on(world: World, running: Running) -> None:
    """Those of all steps are by the first weights, which the replay leaves behind."""
    recipe = world.recipe(
        "untrained", algorithm=GRPO, rollout=running.rollout, parallel={"tensor": 2}
    )
    done = world.megavlm("rollout", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    assert not (world.root / "untrained/checkpoints").exists()
    replay(world, world.root / "untrained", "after_untrained")
    alone, trained = world.metrics("untrained"), world.metrics("after_untrained")
    assert [record["reward"] for record in alone] == [record["reward"] for record in trained]
    assert [record.get("stale_steps", 0) for record in trained] == [0, 1, 2, 3]
    assert all("gradient_norm" not in record for record in alone)


@pytest.mark.slow
def test_a_policy_run_that_stops_and_resumes_is_the_run_again(
    world: World, recorded: Path, on_two_ranks: Path
) -> None:
    """Four steps, or two, a stop and two more: whatever a checkpoint holds is equal in bits."""
    resumed = world.root / "resumed/checkpoints"
    shutil.copytree(step_folder(on_two_ranks / "checkpoints", 2), step_folder(resumed, 2))
    output = replay(world, recorded, "resumed", parallel={"tensor": 2})
    assert "resumed from step 2 of 4" in output
    ours, theirs = step_folder(on_two_ranks / "checkpoints", 4), step_folder(resumed, 4)
    readers = StepReader(ours), StepReader(theirs)
    assert set(readers[0].tensors) == set(readers[1].tensors)
    assert any(key.startswith("optimizer.") for key in readers[0].tensors), "moments, too"
    for key in readers[0].tensors:
        assert torch.equal(readers[0].read(key), readers[1].read(key)), key
    small = ["extra.json", *(path.name for path in ours.glob("random*"))]
    assert len(small) == 3, "the data order, the curriculum; random states of two ranks"
    for name in small:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert [values(r) for r in world.metrics("replayed_on_two")[2:]] == [
        values(r) for r in world.metrics("resumed")
    ]


@pytest.mark.slow
def test_a_replay_with_a_teacher_is_the_run_again(world: World, running: Running) -> None:
    """The policy's own server is the teacher. The replay asks none: its key is wrong."""
    distillation = {
        "teachers": {"itself": {"urls": running.rollout["urls"]}},
        "divergence": "forward_topk",
        "top_k": 16,
        "coefficient": 0.1,
    }
    sections: dict[str, Any] = {
        **SECTIONS,
        "algorithm": {**GRPO, "steps": 2, "minibatches": 1, "kl_coefficient": 0},
        "distillation": distillation,
    }
    replayed = {"replay": str(world.root / "taught/rollouts")}
    recipe = world.recipe(
        "taught", **sections, run={"record_rollouts": True}, rollout=running.rollout
    )
    keys = running.keys | {TEACHER_KEY: running.keys[API_KEY]}
    done = world.megavlm("train", recipe, **keys)
    assert done.returncode == 0, done.stderr
    again = world.recipe("taught_again", **sections, rollout=replayed)
    done = world.megavlm("train", again, **{TEACHER_KEY: "wrong"})
    assert done.returncode == 0, done.stderr
    before, after = (weights(world.root / name, step=2) for name in ("taught", "taught_again"))
    assert before.keys() == after.keys() and len(before) > 5
    assert all(torch.equal(before[key], after[key]) for key in before)
    ours, theirs = world.metrics("taught_again"), world.metrics("taught")
    assert [values(record) for record in ours] == [values(record) for record in theirs]
    # Not 0: the teacher gives probability to suppressed tokens too.
    assert 0 < ours[0]["kl_teacher"] < 2e-3 and ours[1]["teacher_bytes"] > 0
    assert 0 < ours[0]["teacher_rest"] < 1
    sections["distillation"] = distillation | {"top_k": 17}
    done = world.megavlm("train", world.recipe("taught_more", **sections, rollout=replayed))
    assert "has no log-probs of them with distillation.top_k=17 in step 1" in done.stderr

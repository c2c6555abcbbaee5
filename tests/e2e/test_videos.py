"""Whole runs on video files: layouts, rollouts ahead, a replay, an evaluation; one on audio. The
server is the real one.
"""

import json
from typing import Any

import numpy as np
import pytest

from megavlm.demo.data import DemoData
from megavlm.demo.tiny_model import make_tiny_model
from tests.e2e.conftest import Running, World
from tests.parity.inputs import clip, image
from tests.support.video_files import encode_video

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("runs")]

GRPO = {
    "name": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "responses_per_prompt": 4,
    "minibatches": 2,
    "entropy_coefficient": 0.01,  # the gradient is never zero, even where no response is right
}
EVALUATION = {"after": True, "sampled": False}


@pytest.fixture(scope="module")
def data(world: World) -> dict[str, Any]:
    """Keys of a file of twelve rows: a video file of noise of its own length, or two of them."""
    folder = world.root / "videos"
    folder.mkdir()
    generator, lines = np.random.default_rng(0), []
    for number in range(14):
        frames = generator.integers(0, 255, (4 + number, 56, 84, 3))
        (folder / f"{number}.mp4").write_bytes(encode_video(list(frames), 2 + number % 3))
    for number in range(12):
        shown = [f"{number}.mp4", f"{number + 2}.mp4"][: 1 + number % 2]
        problem = "<video>" * len(shown) + "What color is the shape?"
        lines.append(json.dumps({"problem": problem, "answer": "red", "videos": shown}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return {
        "train_files": [str(file)],
        "test_files": [str(file)],
        "image_keys": [],
        "video_key": "videos",
        "video_max_frames": 6,
        "category_key": None,
        "max_prompt_tokens": 128,
        "pack_tokens": 1024,
    }


def trained(world: World, running: Running, name: str, **sections: Any) -> list[dict[str, Any]]:
    """Return the steps of a run."""
    rollout = {**running.rollout, "max_new_tokens": 8, **sections.pop("rollout", {})}
    recipe = world.recipe(name, algorithm=GRPO, optimizer={"lr": 1e-3}, rollout=rollout, **sections)
    done = world.megavlm("train", recipe, **running.keys)
    assert done.returncode == 0, done.stderr
    steps = world.metrics(name)
    assert [step["step"] for step in steps] == [1, 2]
    return steps


@pytest.mark.parametrize(
    "layout",
    [
        {"context": 2},
        pytest.param({"tensor": 2}, marks=pytest.mark.long),
        pytest.param({"pipeline": 2, "first_stage_layers": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_steps_with_videos_on_a_layout(
    world: World, running: Running, data: dict[str, Any], layout: dict[str, int]
) -> None:
    """The server computes what the trainer computes, before and after a push."""
    name = f"videos_{next(iter(layout))}"
    for step in trained(world, running, name, data=data, parallel=layout, evaluation=EVALUATION):
        assert step["rollout_max_difference"] < 1e-4
        assert step["skipped_updates"] == 0 < step["gradient_norm"]
    evaluated = json.loads((world.root / name / "result.json").read_text())["evaluation"]
    assert evaluated["greedy"]["overall"]["count"] == 12
    assert evaluated["shuffled"]["overall"]["count"] == 12


def test_rollouts_ahead_are_recorded_and_replayed(
    world: World, running: Running, data: dict[str, Any]
) -> None:
    """The page of the run shows a frame of each video."""
    folder = world.root / "videos_ahead"
    recording = {"dir": str(folder), "record_rollouts": True}
    ahead = {"max_staleness": 1}
    trained(world, running, "videos_ahead", data=data, rollout=ahead, run=recording)
    assert "image of the prompt" in (folder / "report.html").read_text()
    replay = {"replay": str(folder / "rollouts")}
    first, _ = trained(world, running, "videos_replayed", data=data, rollout=replay)
    assert first["rollout_max_difference"] < 1e-4


def test_an_evaluation_shows_videos(world: World, data: dict[str, Any]) -> None:
    """Of the first six rows every second has two."""
    recipe = world.recipe("videos_evaluated", data=data, evaluation={"sampled": False})
    done = world.megavlm("evaluate", recipe, "--episodes", "6")
    assert done.returncode == 0, done.stderr
    result = json.loads((world.root / "videos_evaluated/evaluation.json").read_text())
    assert result["shuffled"]["overall"]["count"] == 6
    page = (world.root / "videos_evaluated/evaluation.html").read_text()
    assert page.count("<article") == 6 and page.count("image of the prompt") == 9


def test_steps_with_audio_and_images(world: World) -> None:
    """Both towers are trained. The server computes what the trainer computes, with the experts that
    it chose, before and after a push.
    """
    model, folder = world.root / "with_audio", world.root / "audio"
    sets = (world.root / f"data/{name}.parquet" for name in ("train", "test", "warm_start"))
    make_tiny_model(model, DemoData(*sets, "task").texts(), seed=0, family="qwen3_omni_moe")
    folder.mkdir()
    lines = []
    for number in range(12):
        row: dict[str, Any] = {"problem": "What color is the shape?", "answer": "red"}
        if number % 3:
            (folder / f"{number}.wav").write_bytes(clip(0.6 + 0.37 * number, number))
            row |= {"audio": [f"{number}.wav"], "problem": "<audio>" + row["problem"]}
        if number % 3 < 2:
            (folder / f"{number}.png").write_bytes(image(84, 56, number))
            row |= {"images": [f"{number}.png"], "problem": "<image>" + row["problem"]}
        lines.append(json.dumps({"images": [], "audio": [], **row}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    recipe = world.recipe(
        "audio_steps",
        model={"folder": str(model), "freeze_tower": False, "freeze_merger": False},
        data={
            "train_files": [str(file)],
            "test_files": [str(file)],
            "image_keys": ["images"],
            "audio_key": "audio",
            "category_key": None,
            "max_prompt_tokens": 128,
            "pack_tokens": 1024,
        },
        parallel={"data": 2, "expert": 2},
        algorithm=GRPO | {"routing_replay": True},
        optimizer={"lr": 1e-3},
        rollout={"max_new_tokens": 8},
        evaluation=EVALUATION,
    )
    done = world.megavlm("train", recipe)
    assert done.returncode == 0, done.stderr
    for step in world.metrics("audio_steps"):
        assert step["rollout_max_difference"] < 1e-4
        assert step["skipped_updates"] == 0 < step["gradient_norm"]

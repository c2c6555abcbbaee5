"""`megavlm rollout` over a fake server, and a replay's reading of what it wrote."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.algorithm import SFT
from megavlm.config.load import load
from megavlm.config.rollout import Rollout
from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.observability.progress import Progress
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.run.checks.run_lock import run_lock
from megavlm.run.rollout import record_rollouts
from tests.conftest import row, write_rows
from tests.fakes.server import PROMPT_IDS, FakeServer
from tests.support.cache import cached_folder

STEPS, PROMPTS, RESPONSES = 2, 2, 3
TEXTS = ["What colour? 1 2 3 4 5 6 7 8 9"] * 20


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = cached_folder("rollout-model", "", lambda path: make_tiny_model(path, TEXTS, seed=0))
    rows = [row(problem=f"<image>What colour? {i}", answer=str(i)) for i in range(9)]
    write_rows(tmp_path / "rows.parquet", rows)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
run: {{dir: {tmp_path / "run"}}}
model: {{folder: {model}}}
data: {{train_files: [{tmp_path / "rows.parquet"}], max_prompt_tokens: 64}}
algorithm:
  {{name: grpo, prompts_per_step: {PROMPTS}, responses_per_prompt: {RESPONSES}, steps: {STEPS}}}
rollout: {{mode: external, urls: ["http://127.0.0.1:1"], max_staleness: 1}}
reward: {{workers: 1}}
"""
    )
    return path


def extra_tokens(config: Config) -> int:
    """Return how many tokens a prompt has beyond those that it is sent as."""
    rows = Rows(config.data.train_files, config.data)
    prompt = Processor(config.model.folder, config.data, family_of(config.model.folder)).prompt(
        rows[0]
    )
    return len(prompt.token_ids) - len(prompt.short_ids)


def test_rollouts_without_a_trainer_are_those_that_a_replay_reads(
    recipe: Path, tmp_path: Path
) -> None:
    config = load(recipe)
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    rows = Rows(config.data.train_files, config.data)
    extra = extra_tokens(config)
    with FakeServer(prompt_tokens=PROMPT_IDS + extra, weight_version="default") as fake:
        config = load(recipe, [f"rollout.urls=['{fake.url}']"])
        for _ in range(2):  # the second replaces the first
            with Progress() as progress:
                record_rollouts(config, progress)
    recorded = RecordedRollouts(tmp_path / "run/rollouts")
    assert recorded.steps() == [1, 2]
    trained = []
    for step in recorded.steps():
        groups = recorded.load(step, rows, processor)
        trained += [group.prompt.row.index for group in groups]
        episodes = [episode for group in groups for episode in group.episodes]
        assert len(groups) == PROMPTS and len(episodes) == PROMPTS * RESPONSES
        assert {span.version for e in episodes for span in e.responses[0].spans} == {"0"}
        assert all(e.responses[0].logprobs.tolist() == [-0.5, -1.5] for e in episodes)
    assert len(set(trained)) == STEPS * PROMPTS, "one prompt after another"
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(record["episodes"] == PROMPTS * RESPONSES for record in metrics)
    assert not list((tmp_path / "run").glob("checkpoints*"))


def test_two_runs_in_one_folder_are_refused(recipe: Path, tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"), Progress() as progress:
        with pytest.raises(ValueError, match=f"run.dir={tmp_path}/run is in use by process"):
            record_rollouts(load(recipe), progress)
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_full_disk_ends_it_and_names_the_file(recipe: Path, tmp_path: Path) -> None:
    """Rollouts are what it is for: it does not go on without them, as training does."""
    config = load(recipe)
    folder = tmp_path / "run/rollouts"
    folder.mkdir(parents=True)
    (folder / f".step_000001.safetensors.{os.getpid()}.tmp").symlink_to("/dev/full")
    extra = extra_tokens(config)
    with FakeServer(prompt_tokens=PROMPT_IDS + extra, weight_version="default") as fake:
        config = load(recipe, [f"rollout.urls=['{fake.url}']"])
        with Progress() as progress, pytest.raises(OSError, match=r"No space left.*step_000001"):
            record_rollouts(config, progress)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm": SFT()}, "algorithm.name=sft"),
        ({"rollout": Rollout(replay="x")}, "rollout.replay"),
    ],
)
def test_a_recipe_that_samples_nothing_is_one_sentence(
    recipe: Path, changes: dict[str, Any], key: str
) -> None:
    with Progress() as progress, pytest.raises(ValueError, match=f"{key} samples none"):
        record_rollouts(replace(load(recipe), **changes), progress)

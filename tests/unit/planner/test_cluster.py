"""`megavlm plan --cluster`: the split of GPUs between trainer and servers."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megavlm.cli import app
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.planner.cluster import splits
from megavlm.planner.memory import GPU, RunMemory
from megavlm.planner.overview import step_model
from tests.support.levels import slow
from tests.support.releases import released_config
from tests.unit.config.test_recipes import RECIPES

THREE = str(RECIPES / "grpo/qwen2_5_vl_3b_geo3k.yaml")


def test_the_choice_and_the_runner_up_are_commands(tmp_path: Path) -> None:
    released_config("Qwen2.5-VL-3B", tmp_path)
    given = (f"model.folder={tmp_path}", "data.pack_tokens=10240")  # 18,432 fit in turns alone
    command = ["plan", THREE, *given, "--cluster", "2"]
    reply = CliRunner().invoke(app, command)
    assert reply.exit_code == 0, reply.output
    first, choice, choice_start, second, _ = reply.stdout.splitlines()
    assert first.startswith("2 GPUs; modelled") and choice.startswith("Choice: 2 train and serve")
    assert second.startswith("Runner-up: 1 train, 1 serve")
    keys = choice_start.split()[3:]
    assert "rollout.colocate=true" in keys
    config = load(THREE, [*given, *keys])
    hf_config = released_config("Qwen2.5-VL-3B", tmp_path)
    memory = RunMemory.of(config, hf_config, 2)
    assert [*memory.problems()] == []
    seconds = step_model(config, hf_config, 2, memory).seconds()["total"]
    assert f"in turns: {seconds:.1f} to " in choice


@pytest.mark.parametrize(
    ("gpus", "starts"), [(3, "megavlm train"), *slow((24, "megavlm launch RECIPE --nodes 3"))]
)
def test_splits_are_ordered_and_use_all_gpus(gpus: int, starts: str, tmp_path: Path) -> None:
    hf_config = released_config("Qwen2.5-VL-3B", tmp_path)

    def recipe(*keys: str) -> Config:
        return load(THREE, [f"model.folder={tmp_path}", *keys])

    found = splits(recipe, hf_config, gpus, GPU)
    assert len(found) >= 2 and all(split.start.startswith(starts) for split in found)
    assert [*found] == sorted(found, key=lambda split: split.seconds)
    for split in found:
        assert split.trainers + split.serving * (not split.colocate) == gpus
        assert split.slow > split.seconds
    (shared,) = [split for split in found if split.colocate]
    of_node = load(THREE, [f"model.folder={tmp_path}", *shared.overrides]).rollout
    assert of_node.servers * of_node.tensor_parallel == min(gpus, 8)
    assert shared.start.endswith("RECIPE" if gpus < 8 else "--rollout-nodes 0")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--cluster", "12"), "must be a multiple"),
        (("--cluster", "2", "--memory", "8"), "no split"),
    ],
)
def test_gpus_that_cannot_be_split_are_an_error(
    options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    released_config("Qwen2.5-VL-3B", tmp_path)
    reply = CliRunner().invoke(app, ["plan", THREE, f"model.folder={tmp_path}", *options])
    assert isinstance(reply.exception, ValueError) and reason in str(reply.exception)

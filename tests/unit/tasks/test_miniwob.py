"""Rows of MiniWoB++: what a run reads of them, and which it refuses."""

from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.data.rows import Rows
from megavlm.environments.registry import find_environment
from megavlm.rewards.registry import check_reward_row
from megavlm.tasks.miniwob.rows import TASKS, write_rows

RECIPE = Path(__file__).parents[3] / "recipes/tasks/qwen3_vl_2b_miniwob.yaml"


def test_a_recipe_reads_the_rows_and_no_test_seed_is_trained_on(tmp_path: Path) -> None:
    write_rows(tmp_path, TASKS, num_train=90, num_test=30)
    config = load(RECIPE)
    reward = find_environment(config.environment.name).reward
    seeds = {}
    for name in ("train", "test"):
        rows = list(Rows((str(tmp_path / f"{name}.parquet"),), config.data))
        for row in rows:
            check_reward_row(reward, dict(row.extra), {})
        assert {row.category for row in rows} == set(TASKS) and not any(r.images for r in rows)
        seeds[name] = {row.extra["seed"] for row in rows}
    assert (len(seeds["train"]), len(seeds["test"])) == (90, 30)
    assert not seeds["train"] & seeds["test"]


@pytest.mark.parametrize("row", [{"task": "click-tab"}, {"task": 3, "seed": 3}, {"seed": 3}])
def test_a_row_without_a_task_or_a_seed_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"set data.extra_keys=\[task, seed\]"):
        check_reward_row("miniwob", row, {})

"""Length of the warm start on a user's images, and the estimate of its time."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.config.load import load
from megavlm.data.processor import Prompt
from megavlm.demo.pipeline import RECIPES
from megavlm.demo.shapes import ROW_SCHEMA
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.demo.warm_start import EPOCHS, MOST_TOKENS, WarmStart, num_steps, plan_warm_start
from megavlm.families import FAMILIES
from tests.conftest import png
from tests.support.prompts import make_image, make_prompt


def prompt(patches: int) -> Prompt:
    """Return a prompt with two text tokens and an image."""
    image = make_image("key", 2, patches // 2)
    vision = patches // 4
    bare = make_prompt(num_tokens=2 + vision)
    return Prompt(bare.row, bare.token_ids, bare.short_ids, bare.positions, 9, (image,))


def test_small_sets_have_all_epochs() -> None:
    assert num_steps(44, [prompt(1020)], 64) == EPOCHS * 44 // 64
    assert num_steps(3, [prompt(1020)], 64) == 1


def test_steps_follow_from_rows_and_the_size_of_their_images() -> None:
    small, large = num_steps(100_000, [prompt(16)], 64), num_steps(100_000, [prompt(1020)], 64)
    for steps, cost in ((small, 16 + 2), (large, 1020 + 2)):
        assert MOST_TOKENS - 64 * cost < steps * 64 * cost <= MOST_TOKENS
    mixed = [prompt(16), prompt(1020)]
    assert large < num_steps(100_000, mixed, 64) < small


@pytest.mark.parametrize("family", FAMILIES)
def test_the_time_of_a_recipes_rows_is_measured(family: str, tmp_path: Path) -> None:
    rows = [
        {
            "images": [{"bytes": png(64, 64), "path": None}],
            "problem": "<image>Which colour?",
            "answer": "red",
            "task": "question",
        }
        for _ in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=ROW_SCHEMA), tmp_path / "rows.parquet")
    make_tiny_model(tmp_path / "model", ["Which colour? red"] * 9, seed=0, family=family)
    keys = [
        f"model.folder={tmp_path / 'model'}",
        f"data.train_files=[{tmp_path / 'rows.parquet'}]",
        "data.category_key=task",
    ]
    config = load(RECIPES / "sft_any.yaml", keys)
    planned = plan_warm_start(config, None)
    assert planned.steps == 1 and planned.seconds > 0
    twice = plan_warm_start(config, 50)
    assert twice.steps == 50 and twice.seconds > planned.seconds


def test_the_estimate_is_a_sentence() -> None:
    text = "20 steps, about 2 min 05 s on 2 cores that have nothing else to do"
    assert str(WarmStart(20, 125.0, 2)) == text

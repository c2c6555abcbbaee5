"""Each variant of the demo has a folder of its own, and its recipe finds what is made there."""

from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.demo.pipeline import RECIPES, drawn_tasks
from megavlm.demo_folder import demo_command, demo_folder

NAMES = sorted(path.stem.removesuffix("_shapes") for path in RECIPES.glob("*_shapes.yaml"))
NAMES.remove("sft")  # the warm start of each


@pytest.mark.parametrize(
    ("options", "folder", "command"),
    [
        ({}, "runs/demo", "make demo"),
        ({"algorithm": "zoom"}, "runs/demo-zoom", "make demo ENV=zoom"),
        ({"family": "qwen3_vl"}, "runs/demo-qwen3_vl", "make demo FAMILY=qwen3_vl"),
        ({"seed": 1}, "runs/demo-seed1", "make demo SEED=1"),
        ({"data": Path("x/my photos, 2")}, "runs/demo-data-my_photos_2", None),
        ({"data": Path("photos")}, "runs/demo-data-photos", "make demo DATA=.../photos"),
        (
            {"algorithm": "ppo", "family": "qwen2_vl", "seed": 12},
            "runs/demo-ppo-qwen2_vl-seed12",
            "make demo ENV=ppo FAMILY=qwen2_vl SEED=12",
        ),
        (
            {"seed": 2, "data": Path("a-data-b")},
            "runs/demo-seed2-data-a-data-b",
            "make demo SEED=2 DATA=.../a-data-b",
        ),
    ],
)
def test_each_variant_has_a_folder_and_the_folder_names_its_command(
    options: dict[str, object], folder: str, command: str | None
) -> None:
    assert demo_folder(**options) == Path(folder)  # type: ignore[arg-type]
    for path in (folder, f"{folder}/model", f"/home/me/{folder}/data/train.parquet"):
        assert command is None or demo_command(path) == command


@pytest.mark.parametrize("path", ["models/demo", "runs/mine/model", "runs/demonstration/model"])
def test_other_paths_are_not_the_demo_s(path: str) -> None:
    assert demo_command(path) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_s_recipe_names_the_files_that_its_demo_makes(name: str) -> None:
    config, plain = (load(RECIPES / f"{one}_shapes.yaml") for one in (name, "grpo"))
    own = demo_folder(name)
    assert Path(config.run.dir) == own
    shown = [
        (made.data.max_pixels, made.data.max_prompt_tokens, made.data.video_key)
        for made in (config, plain)
    ]
    is_plain = drawn_tasks(name) is None and shown[0] == shown[1]
    made_in = demo_folder() if is_plain else own
    assert Path(config.model.folder) == made_in / "model"
    assert config.model.checkpoint == str(made_in / "warm_start/checkpoints")
    assert config.data.train_files == (str(made_in / "data/train.parquet"),)
    assert config.data.test_files == (str(made_in / "data/test.parquet"),)

"""A dry run finds what a run would meet once its ranks and servers are up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoint_tools.import_hf import import_hf
from megavlm.config.dump import to_yaml
from megavlm.config.load import load
from megavlm.data.media import image_sources
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.run.checks import dry_run
from megavlm.run.checks.run_lock import run_lock
from tests.conftest import png, row, write_rows
from tests.support.cache import cached_folder
from tests.unit.run.checks import WriteRecipe

URL = "https://example.org/x.png"


def make(folder: Path) -> None:
    make_tiny_model(folder, ["Colour? red"] * 20, seed=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = cached_folder("dry-run-model", "", make)
    return Path(shutil.copytree(folder, tmp_path / "tiny"))


DryRun = Callable[..., str]


@pytest.fixture
def dry(write_recipe: WriteRecipe, model: Path) -> DryRun:
    def run(*overrides: str, phase: Any = "train") -> str:
        config = load(write_recipe(), [f"model.folder={model}", *overrides])
        return dry_run.dry_run(config, world_size=1, phase=phase)

    return run


def refused(dry: DryRun, *overrides: str, **options: str) -> str:
    with pytest.raises(ValueError) as caught:
        dry(*overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_it_prints_what_it_resolved_and_what_it_looked_at(
    dry: DryRun, model: Path, write_recipe: WriteRecipe
) -> None:
    out = dry("algorithm.steps=9")
    config = load(write_recipe(), [f"model.folder={model}", "algorithm.steps=9"])
    assert out.startswith(to_yaml(config)) and yaml.safe_load(out)["algorithm"]["steps"] == 9
    lines = out.removeprefix(to_yaml(config)).splitlines()
    assert lines[0].startswith("# Checked: ") and lines[0].endswith("by name and shape")
    assert (
        "data.train_files, 2 rows: columns, images and rewards of all; prompts of all (at"
        in lines[1]
    )
    assert len(lines) == 3 and lines[2].startswith("# Not checked: values of tensors")
    assert "data.test_files" in dry("evaluation.after=true")
    assert "data.train_files" not in dry(phase="evaluate").partition("# Checked")[2]


def test_tensors_that_do_not_fit_config_json(dry: DryRun, model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    edit(model, text_config=values["text_config"] | {"intermediate_size": 512})
    assert "config.json makes it" in refused(dry)
    edit(model, text_config=values["text_config"], tie_word_embeddings=True)
    assert "differs from" in (said := refused(dry)) and "but config.json ties them" in said


def test_a_checkpoint_of_another_size(dry: DryRun, model: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    import_hf(model, checkpoint)
    given = f"model.checkpoint={checkpoint}"
    assert f"and those of {checkpoint}/step_00000000" in dry(given)
    shutil.rmtree(model)
    make_tiny_model(model, ["Colour? red"] * 20, seed=0, num_layers=4)
    assert "num_hidden_layers=3, but the one in model.folder" in refused(dry, given)
    (checkpoint / "hf" / "config.json").unlink()  # its tensors still tell
    assert "holds " in (said := refused(dry, given)) or "has no tensor" in said
    assert "name a folder and a checkpoint of one model" in said


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([row()], ["data.max_prompt_tokens=5"], "own_rows.parquet:0: the prompt has "),
        (
            [row(), row()],
            ["data.max_prompt_tokens=5", "data.long_prompts=skip"],
            "data.train_files: none of 2 rows, evenly spread, can be used: ",
        ),
        (
            [row(problem="<image><|image_pad|>")],
            [],
            "own_rows.parquet:0: 'problem' holds '<|image_pad|>', a control token",
        ),
        ([row(answer="red<|im_end|>")], [], "own_rows.parquet:0: 'answer' holds '<|im_end|>', a"),
        (
            [row(problem="<image><|image_pad|>")],
            ["data.bad_samples=skip"],
            "none of 1 rows, evenly spread, can be used: ",
        ),
    ],
)
def test_rows_that_make_no_prompt(
    dry: DryRun, tmp_path: Path, rows: list[dict[str, Any]], overrides: list[str], message: str
) -> None:
    path = write_rows(tmp_path / "own_rows.parquet", rows)
    quiet = ["evaluation.after=false", f"data.train_files={path}"]
    assert message in refused(dry, *quiet, *overrides)
    good = write_rows(tmp_path / "good.parquet", [*rows, row(), row(images=[], problem="q")])
    if "skip" in str(overrides) and "max_prompt" not in str(overrides):
        assert "1 of them would be skipped, first: " in dry(f"data.train_files={good}", *overrides)


def test_chats_whose_answers_the_template_cannot_render(dry: DryRun, tmp_path: Path) -> None:
    user = {"role": "user", "content": "?"}
    chats = {
        "thoughts": [user, {"role": "assistant", "content": "!", "reasoning_content": "?"}],
        "good": [user, {"role": "assistant", "content": "!"}] * 2,
    }
    for name, chat in chats.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([{"messages": chat}]))
    keys = ["data.prompt_key=messages", "data.answer_key=null", "data.image_keys=[]"]
    quiet = [*keys, "data.test_files=[]", "data.category_key=null", "algorithm.name=sft"]
    said = refused(dry, *quiet, f"data.train_files={tmp_path}/thoughts.json")
    assert "thoughts.json:0: the chat has reasoning_content, but the model's chat" in said
    assert "prompts of all" in dry(*quiet, f"data.train_files={tmp_path}/good.json")


def test_some_images_at_urls_are_fetched(
    dry: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(image_sources, "fetch", lambda url: asked.append(url) or png())
    rows = write_rows(tmp_path / "urls.parquet", [row(images=[URL]) for _ in range(5)])
    out = dry(f"data.train_files={rows}")
    assert "images at URLs fetched for 3 rows, and for 2 not" in out
    assert len(asked) == dry_run.FETCHED


def test_only_evenly_spread_rows_become_prompts(
    dry: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = row(problem="<image><|image_pad|>")
    rows = write_rows(tmp_path / "many.parquet", [row(), bad, row()])
    monkeypatch.setattr(dry_run, "PROMPTS", 2)
    assert "prompts of evenly spread 2 (" in dry(f"data.train_files={rows}")
    monkeypatch.setattr(dry_run, "PROMPTS", 3)
    assert "many.parquet:1: " in refused(dry, f"data.train_files={rows}")


def test_it_looks_at_the_folder_of_a_run_that_is_going_on(dry: DryRun, tmp_path: Path) -> None:
    with run_lock(tmp_path / "used"):
        assert "# Checked" in dry(f"run.dir={tmp_path / 'used'}")


def test_unusual_values_are_said_and_not_refused(dry: DryRun) -> None:
    assert "# Unusual" not in dry()
    out = dry("optimizer.lr=5e3", "rollout.temperature=70", "lora.rank=4", "lora.alpha=4e4")
    assert "# Unusual: optimizer.lr=5000 is outside the usual range, 1e-08 to 0.01\n" in out
    assert "# Unusual: rollout.temperature=70 is" in out
    assert "# Unusual: lora.alpha=40000 is outside the usual range for lora.rank=4, 1 to 32" in out


def test_test_files_that_are_trained_on_are_said(dry: DryRun, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.parquet", [row(), row()])
    copy = shutil.copyfile(train, tmp_path / "b.parquet")
    for test in (train, copy):
        out = dry(
            f"data.train_files=[{train}]", f"data.test_files=[{test}]", "evaluation.after=true"
        )
        assert f"# Unusual: data.test_files: {test} holds the same as {train}" in out


def test_rows_that_ask_nothing_are_said(dry: DryRun, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row(), row(problem=" <image> ")])
    out = dry(f"data.train_files=[{file}]")
    assert f"1 of them ask nothing, as their problem has no text, first: {file}:" in out

"""What `megavlm evaluate --model` takes, and which rows are asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.data.processor import PromptTooLong
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.questions import usable
from megavlm.run.checks import preflight
from megavlm.run.model_paths import model_kind, served_folder

WriteRecipe = Callable[..., Path]


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_kinds(tmp_path: Path) -> None:
    assert model_kind(make(tmp_path / "hf", "config.json", "model.safetensors")) == "hf"
    adapter = make(tmp_path / "peft", "adapter_config.json", "adapter_model.safetensors")
    assert model_kind(adapter) == "adapter"
    assert model_kind(make(tmp_path / "run", "step_00000003/manifest.json")) == "checkpoint"
    assert (
        model_kind(make(tmp_path / "step", "manifest.json", "config.json", "x.safetensors"))
        == "checkpoint"
    )
    for other in (tmp_path / "absent", make(tmp_path / "half", "config.json")):
        with pytest.raises(ValueError, match="is not a model: give a Megatron checkpoint"):
            model_kind(other)


def test_each_kind_is_turned_into_a_folder(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(write_recipe())
    calls: list[Any] = []
    monkeypatch.setattr(
        "checkpoint_tools.export_hf.export_hf",
        lambda *a, options: calls.append(("export", *a, options.experts)),
    )
    monkeypatch.setattr(
        "checkpoint_tools.lora.merge_adapters.merge_adapters",
        lambda *a, adapter, options: calls.append(("merge", a[0], adapter, options.experts)),
    )
    with served_folder(config, None) as folder:
        assert folder == tmp_path / "model"
    other = make(tmp_path / "hf", "config.json", "model.safetensors")
    with served_folder(config, str(other)) as folder:
        assert folder == other
    assert calls == []
    checkpoint = make(tmp_path / "run", "step_00000003/manifest.json")
    with served_folder(config, str(checkpoint)) as folder:
        assert calls == [("export", checkpoint, folder, "hub")]
    assert not folder.parent.exists()
    adapter = make(tmp_path / "peft", "adapter_config.json")
    with served_folder(config, str(adapter)):
        assert calls[1:] == [("merge", tmp_path / "model", adapter, "hub")]
    started = load(write_recipe(), [f"model.checkpoint={checkpoint}"])
    with served_folder(started, str(adapter)):
        assert calls[2:] == [("merge", checkpoint, adapter, "hub")]
    with served_folder(started, None) as folder:
        assert calls[3][:2] == ("export", checkpoint)


def test_wrong_models_are_refused_before_anything_starts(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    def check(*overrides: str) -> None:
        preflight.check(load(write_recipe(), overrides), world_size=1, phase="evaluate")

    with pytest.raises(ValueError, match=r"evaluation\.baseline: .*nowhere is not a model"):
        check(f"evaluation.baseline={tmp_path / 'nowhere'}")
    external = ("rollout.mode=external", "rollout.urls=[http://127.0.0.1:1]")
    check(*external)
    with pytest.raises(ValueError, match=r"evaluation\.model=.* with rollout\.mode=external"):
        check(*external, f"evaluation.model={tmp_path / 'model'}")


def test_rows_that_cannot_be_asked(tmp_path: Path) -> None:
    texts = ["good", "bad", "long", "good", "good"]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"problem": "{text}", "answer": "a"}}\n' for text in texts))
    rows = Rows([str(path)], Data())

    def prompt(row: Row) -> None:
        if row.problem == "bad":
            raise ValueError(f"{row.source}: broken")
        if row.problem == "long":
            raise PromptTooLong(f"{row.source}: too long")

    found, skipped = usable(rows, prompt, Data(bad_samples="skip", long_prompts="skip"), 2)
    assert [row.index for row in found] == [0, 3]
    assert (skipped.bad, skipped.long) == (1, 1)
    assert skipped.reasons == (f"{path}:2: broken", f"{path}:3: too long")
    assert len(usable(rows, prompt, Data(), None)[0]) == 5
    with pytest.raises(PromptTooLong, match="too long"):
        usable(rows, prompt, Data(bad_samples="skip"), None)
    with pytest.raises(ValueError, match="broken"):
        usable(rows, prompt, Data(long_prompts="skip"), None)
    path.write_text('{"problem": "bad", "answer": "a"}\n')
    none = Rows([str(path)], Data())
    with pytest.raises(ValueError, match=r"no row can be asked; .*broken"):
        usable(none, prompt, Data(bad_samples="skip"), None)

"""Models that adapters are put on: a checkpoint, a folder that holds both, one of a small dtype."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint_tools.command import refusal, run
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import load, load_adapters, logits, relative, rewrite

FAMILY = "qwen2_5_vl"  # of the adapters
K_PROJ = "base_model.model.model.language_model.layers.0.self_attn.k_proj"


def test_a_checkpoint_may_be_the_base(peft: Path, hf_folder: Folder, tmp_path: Path) -> None:
    """A merge needs no checkpoint in between, and a checkpoint may be the base."""
    tensors = load_file(peft / "adapter_model.safetensors")
    save_file(tensors, peft / "adapter_model.safetensors")  # without metadata
    assert not run("import", hf_folder(FAMILY), tmp_path / "base")
    assert not run("lora-merge", tmp_path / "base", tmp_path / "a", "--adapter", peft)
    assert not run("lora-merge", hf_folder(FAMILY), tmp_path / "b", "--adapter", peft)
    assert not run("verify", tmp_path / "a", tmp_path / "b")
    assert not run("lora-import", peft, tmp_path / "c", "--base", tmp_path / "base")
    assert not run("export", tmp_path / "c", tmp_path / "d")
    assert not run("verify", tmp_path / "a", tmp_path / "d")


def test_adapters_beside_their_model(
    made: Path, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers loads such a folder with its adapters; the refusal says how to keep them."""
    hf = hf_folder(FAMILY)
    both = Path(shutil.copytree(hf, tmp_path / "in"))
    shutil.copytree(made / "peft", both, dirs_exist_ok=True)
    theirs = logits(load_adapters(hf, made / "peft"))
    assert torch.equal(logits(load(both)), theirs)

    message = refusal(capsys, "import", both, tmp_path / "out")
    assert (
        f"{both} contains both a model and adapters" in message and "or move them away" in message
    )
    for command in (
        ("inspect", both),
        ("verify", both, hf),
        ("verify", hf, both, "--logits"),
        ("lora-merge", both, tmp_path / "out"),
        ("lora-merge", both, tmp_path / "out", "--adapter", made / "peft"),
        ("lora-import", made / "peft", tmp_path / "out", "--base", both),
    ):
        assert refusal(capsys, *command) == message
    assert [path.name for path in tmp_path.iterdir()] == ["in"]

    match = re.search(r"\(megavlm-convert (.+)\)", message)
    assert match
    command = shlex.split(match[1].replace("OUTPUT", str(tmp_path / "merged")))
    assert not run(*command)
    assert relative(logits(load(tmp_path / "merged")), theirs) < 1e-5
    assert not run("import", tmp_path / "merged", tmp_path / "imported")

    assert not run("lora-import", both, tmp_path / "checkpoint", "--base", both)
    assert not run("export", tmp_path / "checkpoint", tmp_path / "exported")
    assert not run("verify", tmp_path / "merged", tmp_path / "exported")
    capsys.readouterr()
    assert "has no steps" in refusal(
        capsys, "lora-merge", both, tmp_path / "out", "--adapter", both, "--step", 0
    )

    (both / "adapter_model.safetensors").unlink()
    (both / "adapter_config.json").unlink()
    assert not run("import", both, tmp_path / "moved away")


def test_a_merge_that_does_not_fit_its_dtype(
    peft: Path, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum alone is too large, of a projection in the middle of a fused linear."""

    def large(tensors: dict[str, Any]) -> None:
        for side, value in (("A", 100), ("B", -200)):
            tensors[f"{K_PROJ}.lora_{side}.weight"][:] = 0
            tensors[f"{K_PROJ}.lora_{side}.weight"][0, 0] = value
        tensors[f"{K_PROJ}.lora_B.weight"][0, 0] *= 3

    rewrite(peft, large)
    merge = ("lora-merge", hf_folder(FAMILY), tmp_path / "out", "--adapter", peft)
    message = refusal(capsys, *merge, "--dtype", "float16")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert (
        message
        == f"{name} holds -90000, but float16 has a maximum of 65504: export with --dtype bfloat16."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not run(*merge, "--dtype", "bfloat16")

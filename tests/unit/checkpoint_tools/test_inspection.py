"""`inspect` shows the contents of a folder."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from checkpoint_tools.inspect_weights import weights_components, weights_summary
from checkpoint_tools.weights import open_weights
from megavlm.families import UNTRAINED
from tests.parity.table import FAMILIES
from tests.support.families import is_tower
from tests.unit.checkpoint_tools.command import run, sentence
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import make_adapters


def inspect(*arguments: object) -> None:
    assert run("inspect", *arguments) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_components_are_the_model(family: str, hf_folder: Folder, imported: Folder) -> None:
    tensors = load_file(hf_folder(family) / "model.safetensors")
    trained = {name: x for name, x in tensors.items() if not name.startswith(UNTRAINED)}
    for folder in (hf_folder(family), imported(family)):
        # A Megatron tensor may hold several of HuggingFace's, which export counts.
        assert weights_summary(open_weights(folder))["hf_tensors"] == len(tensors)
        parts = {part.name: part for part in weights_components(open_weights(folder))}
        expected = {"tower", "embedding", "attention", "mlp", "output"}
        if family.endswith("_moe"):
            expected.add("experts")
        if family == "qwen3_5_moe":  # whose shared expert counts with the others
            expected.remove("mlp")
        assert set(parts) == expected
        assert sum(part.parameters for part in parts.values()) == sum(
            x.numel() for x in trained.values()
        )
        tower = sum(x.numel() for name, x in trained.items() if is_tower(name))
        assert parts["tower"].parameters == tower
        assert parts["tower"].dtypes == {"float32": 4 * tower}
        if "experts" in parts:  # the router and the norm before it count with them
            held = [x for name, x in trained.items() if re.search(r"\.(shared_)?experts?\.", name)]
            stacks = sum(x.numel() for x in held)
            assert stacks < parts["experts"].parameters < 1.1 * stacks


def test_a_step_tells_where_it_comes_from(
    imported: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(imported("qwen2_5_vl"), "--json")
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert record["path"].endswith("checkpoint/step_00000000")
    assert (record["kind"], record["family"], record["step"]) == ("checkpoint", "qwen2_5_vl", 0)
    assert record["has_optimizer"] is False and record["layout"] == {}
    assert record["bytes"] == 4 * record["parameters"]
    inspect(imported("qwen2_5_vl"))
    text = capsys.readouterr().out
    assert "step_00000000" in text and f"{record['parameters']:,}" in text


def test_the_layout_that_saved_a_step_is_shown(
    imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in imported("qwen2_vl").rglob("*"):
        target = tmp_path / path.relative_to(imported("qwen2_vl"))
        if path.is_dir():
            target.mkdir()
        else:
            target.write_bytes(path.read_bytes())
    path = tmp_path / "step_00000000" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest |= {"layout": {"tensor": 2, "pipeline": 4, "data": 1}, "has_optimizer": True}
    path.write_text(json.dumps(manifest))
    inspect(tmp_path)
    text = capsys.readouterr().out
    assert (
        "tensor 2, pipeline 4" in text
        and "data" not in text
        and re.search(r"optimizer +saved", text)
    )


@pytest.mark.parametrize("text", ["", "garbage"])
def test_a_bad_tracker_is_one_warning_of_a_command(
    imported: Folder, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(imported("qwen2_vl"), tmp_path / "checkpoint"))
    (folder / "latest").write_text(text)
    for command, count in (
        (("inspect", folder), 1),
        (("inspect", folder, "--step", "0"), 0),
        (("verify", folder, folder), 1),
        (("verify", folder, folder / "step_00000000"), 1),
        (("export", folder, tmp_path / "out"), 1),
    ):
        caplog.clear()
        assert run(*command) == 0
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * count, command


def test_a_quiet_inspection_only_says_what_is_wrong(
    hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(hf_folder("qwen2_vl"), "--quiet", "--mapping")
    make_adapters(hf_folder("qwen2_vl"), tmp_path / "peft", target_modules=["self_attn.k_proj"])
    capsys.readouterr()
    inspect(tmp_path / "peft", "--quiet")
    assert capsys.readouterr().out == ""
    assert run("inspect", tmp_path / "nowhere", "--quiet") == 2
    assert "is not a folder" in sentence(capsys)


def test_the_mapping_names_every_tensor_of_both_sides(
    hf_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(hf_folder("qwen3_vl_moe"), "--mapping", "--json")
    rows = json.loads(capsys.readouterr().out)["mapping"]
    tensors = load_file(hf_folder("qwen3_vl_moe") / "model.safetensors")
    assert {name for row in rows for name in row["hf"]} == set(tensors)
    by_name = {row["megatron"]: row for row in rows}
    qkv = by_name["language_model.decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [name.rpartition("self_attn.")[2] for name in qkv["hf"]] == [
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
    ]
    assert qkv["shape"] == [256, 128] and qkv["cut"] == {"dim": 0, "parts": 1, "axis": "tensor"}
    experts = next(row for row in rows if row["experts"])
    assert experts["experts"] == experts["shape"][0] == 8
    assert experts["cut"] == {"dim": 1, "parts": 2, "axis": "expert_tensor"}

    inspect(hf_folder("qwen3_vl_moe"), "--mapping")
    text = capsys.readouterr().out
    assert all(name in text for name in tensors)
    assert "dim 0 in 2 parts over tensor" in text

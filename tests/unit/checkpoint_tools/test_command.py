"""The command line: what it says, and how it refuses."""

import re
from pathlib import Path

import pytest

from tests.unit.checkpoint_tools.command import assert_nothing_partial, refusal, run
from tests.unit.checkpoint_tools.conftest import Folder

FAMILY = "qwen2_5_vl"


def test_both_ways(hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = hf_folder(FAMILY)
    capsys.readouterr()
    assert not run("import", hf, tmp_path / "checkpoint")
    out, error = capsys.readouterr()
    assert re.search(r"\d+ tensors, [\d.]+ MB, imported into", out) and not error
    assert not run("export", tmp_path / "checkpoint", tmp_path / "out", "--max-shard-size", "0.5MB")
    assert len(list(tmp_path.glob("out/*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("import {hf} {checkpoint}", "/checkpoint is not empty: choose another folder, or add"),
        ("import nowhere {new}", "nowhere is not a HuggingFace model folder: No such file"),
        ("export {checkpoint} {new} --step 7", "no complete checkpoint of step 7; it has steps 0."),
        ("export {hf} {new}", "holds no complete checkpoint"),
        ("export {checkpoint} {new} --max-shard-size many", "is not a size: write it as 5GB"),
        ("export {checkpoint} {hf}/config.json/x", "config.json is a file: name a folder"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(
    hf_folder: Folder,
    imported: Folder,
    tmp_path: Path,
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"hf": hf_folder(FAMILY), "checkpoint": imported(FAMILY), "new": tmp_path / "new"}
    assert message in refusal(capsys, *arguments.format(**places).split())
    for folder in (tmp_path, places["hf"].parent, places["checkpoint"].parent):
        assert_nothing_partial(folder)

"""Checkpoints that an export refuses: damaged ones, and ones of another model than they say."""

import json
import os
import shutil
from pathlib import Path

import pytest

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from tests.unit.checkpoint_tools.conftest import Folder

FAMILY = "qwen2_5_vl"


@pytest.fixture
def checkpoint(imported: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported(FAMILY), tmp_path / "checkpoint"))


def rewrite(step: Path, /, **values: object) -> None:
    path = step / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda step: damage(step / "__0_0.distcp"), r"__0_0\.distcp is damaged"),
        (lambda step: os.truncate(step / "__0_0.distcp", 99), r"__0_0\.distcp has 99 bytes"),
        (lambda step: (step / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
        (lambda step: (step / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
        (lambda step: (step / "manifest.json").unlink(), "holds no complete checkpoint"),
        (
            lambda step: rewrite(step, files=None),
            r"manifest\.json cannot be read .*: files is None",
        ),
        (lambda step: rewrite(step, files=["x"]), r"manifest\.json cannot be read .*: files is \["),
        (lambda step: rewrite(step, files={"x": {}}), r"manifest\.json cannot .*: x has \{\} inst"),
        (lambda step: rewrite(step, files={"x": 3}), r"manifest\.json cannot .*: x has 3 instead"),
        (lambda step: rewrite(step, layout=None), r"manifest\.json cannot .*: layout is None"),
        (
            lambda step: rewrite(step, layout={"tensor": "2"}),
            r"manifest\.json cannot .*: layout is",
        ),
        (lambda step: rewrite(step, scores=None), r"manifest\.json cannot .*: scores is None"),
        (lambda step: rewrite(step, step="0"), r"manifest\.json cannot .*: step is '0'"),
        (lambda step: shutil.rmtree(step.parent / "hf"), "is not a HuggingFace model folder"),
        (
            lambda step: os.truncate(step.parent / "hf/tokenizer.json", 100),
            r"hf/tokenizer\.json has 100 bytes; .* changed on purpose, delete .*/hf/checksums\.",
        ),
        (lambda step: damage(step.parent / "hf/tokenizer.json"), r"hf/tokenizer\.json is damaged"),
        (lambda step: (step.parent / "hf/tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (
            lambda step: (step.parent / "hf/checksums").write_text("{"),
            "hf/checksums cannot be read",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(
    checkpoint: Path, tmp_path: Path, spoil: object, message: str
) -> None:
    spoil(checkpoint / "step_00000000")  # type: ignore[operator]  # a function of one path
    with pytest.raises(ValueError, match=message):
        export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checksums_of_the_model_s_files_stay_where_they_are(
    checkpoint: Path, tmp_path: Path
) -> None:
    """No export has them; a checkpoint without them, as there were some, is taken as it is."""
    sums = json.loads((checkpoint / "hf" / "checksums").read_text())
    names = {path.name for path in (checkpoint / "hf").iterdir()}
    assert sums.keys() == names - {"checksums"} and "tokenizer.json" in sums
    export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "checksums").exists()
    (checkpoint / "hf" / "checksums").unlink()
    (checkpoint / "hf" / "tokenizer.json").write_text("other")
    export_hf(checkpoint, tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "other"


def test_a_checkpoint_of_another_size_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "hf" / "checksums").unlink()
    path = checkpoint / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .*number of `layer_types`"):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"]["layer_types"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\..* is not a tensor of the model"):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"] |= {"num_hidden_layers": 5}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no tensor .*decoder\.layers\.4\."):
        export_hf(checkpoint, tmp_path / "out")
    config["text_config"] |= {"num_hidden_layers": 4, "intermediate_size": 512}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"linear_fc1\.weight .*\(512, 128\).*\(1024, 128\)"):
        export_hf(checkpoint, tmp_path / "out")


def test_only_a_folder_of_its_kind_is_replaced(hf_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match="--force does not replace such a folder"):
        import_hf(hf_folder(FAMILY), tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

"""`verify`: equal to the last bit, or the tensors that are not, by name."""

import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools import compare_logits
from checkpoint_tools.compare_weights import difference
from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.checkpointing.checksums import file_checksums
from megavlm.checkpointing.folder import Manifest
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.writer import RecordFile, write_contents
from megavlm.families import model_values
from megavlm.model_config import model_config
from megavlm.models.common.hf_source import HFFolder
from tests.support.levels import slow
from tests.unit.checkpoint_tools.command import run, sentence
from tests.unit.checkpoint_tools.conftest import ADAPTED, Folder

MOE = "qwen3_vl_moe"
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"


def verify(*arguments: object) -> int:
    return run("verify", *arguments)


def changed(hf: Path, folder: Path, **tensors: Any) -> Path:
    """A copy with other tensors: what each function makes of the tensor that there is."""
    shutil.copytree(hf, folder)
    path = folder / "model.safetensors"
    found = load_file(path)
    for name, change in tensors.items():
        found[name] = change(found[name].clone())
    save_file(found, path, {"format": "pt"})
    return folder


def with_value_head(hf: Path, folder: Path, value: float) -> Path:
    """A checkpoint as one of a shared critic is."""
    import_hf(hf, folder)
    step = folder / "step_00000000"
    reader = StepReader(step)
    tensors = {name: reader.read(name) for name in reader.tensors}
    tensors["value_head.weight"] = torch.full((1, 128), value)
    for path in step.iterdir():
        path.unlink()
    with RecordFile(step, 0) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    write_contents(step, tensors, file.pieces)
    sums = file_checksums(step, [path.name for path in step.iterdir()])
    Manifest(step=0, has_optimizer=False, layout={}, files=sums).write(step)
    return folder


def test_value_heads_are_compared_and_an_export_says_that_it_has_none(
    hf_folder: Folder, imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hf_folder("qwen2_vl")
    a, b = (with_value_head(hf, tmp_path / f"{x}", x) for x in (0.5, 0.25))
    assert verify(a, a) == 0
    capsys.readouterr()
    assert verify(a, b) == 1
    assert "value_head.weight differs in 128 of 128 entries" in capsys.readouterr().out
    assert verify(a, imported("qwen2_vl")) == 1
    assert f"value_head.weight is only in {a}/step_00000000" in capsys.readouterr().out
    assert run("export", a, tmp_path / "out") == 0
    assert capsys.readouterr().out.endswith(" s; left out: value_head.weight\n")
    assert verify(hf, tmp_path / "out") == 0


def set_entry(place: tuple[int, ...], value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize("kind", ["hf hf", "hf checkpoint", "checkpoint hf", "checkpoint itself"])
def test_equal_models_of_either_kind(
    hf_folder: Folder,
    imported: Folder,
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export_hf(imported(MOE), tmp_path / "out", options=WriteOptions(max_shard_bytes=10**6))
    sides = {
        "hf hf": (hf_folder(MOE), tmp_path / "out"),
        "hf checkpoint": (hf_folder(MOE), imported(MOE)),
        "checkpoint hf": (imported(MOE), tmp_path / "out"),
        "checkpoint itself": (imported(MOE), imported(MOE) / "step_00000000"),
    }
    assert verify(*sides[kind]) == 0
    stacks = load_file(hf_folder(MOE) / "model.safetensors")
    count = sum(len(x) if ".experts." in name else 1 for name, x in stacks.items())
    assert capsys.readouterr().out == f"All {count} tensors are equal, bit by bit.\n"


def test_tensors_that_differ_are_named_with_place_and_count(
    hf_folder: Folder, imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "model.language_model.layers.1.self_attn.k_proj.weight"
    other = changed(
        hf_folder(MOE),
        tmp_path / "other",
        **{GATE_UP: set_entry((5, 7, 3), 2.0), key: set_entry((0, 1), 3.0)},
    )
    assert verify(imported(MOE), other) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("2 of ")
    assert lines[0].startswith(f"  {GATE_UP}[5] differs in 1 of 24576 entries, first at [7, 3]: ")
    assert lines[1].startswith(f"  {key} differs in 1 of 8192 entries, first at [0, 1]: ")
    assert lines[0].endswith(" and 2") and len(lines) == 2


def test_the_record_is_json_and_only_the_first_are_named(
    hf_folder: Folder, imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_hf(imported("qwen2_vl"), tmp_path / "half", options=WriteOptions(dtype=torch.bfloat16))
    assert verify(hf_folder("qwen2_vl"), tmp_path / "half", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    total = len(load_file(hf_folder("qwen2_vl") / "model.safetensors"))
    assert (record["is_equal"], record["equal"], record["different"]) == (False, 0, total)
    assert len(record["first"]) == 10
    assert record["first"][0].endswith(" has dtypes torch.float32 and torch.bfloat16")
    assert verify(hf_folder("qwen2_vl"), tmp_path / "half", "--quiet") == 1
    assert capsys.readouterr().out == ""


def test_models_of_different_families_differ(
    hf_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(hf_folder("qwen3_vl"), hf_folder(MOE), "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert any(
        "q_proj.weight makes a Megatron tensor (384, 128) and (256, 128)" in one
        for one in record["first"]
    )
    assert any(f"is only in {hf_folder('qwen3_vl')}" in one for one in record["first"])


def test_bits_count_not_values() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert difference(zero, -zero) is not None
    assert difference(nan, nan) is None
    assert difference(torch.empty(0), torch.empty(0)) is None
    a, b = torch.zeros(3, 4).bfloat16(), torch.zeros(4, 3).bfloat16().t()
    assert difference(a, b) is None
    b[1, 2] = b[2, 0] = 1
    problem = difference(a, b)
    assert problem == "differs in 2 of 12 entries, first at [1, 2]: 0 and 1"


def test_logits_with_the_largest_difference_and_its_place(
    hf_folder: Folder, imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--logits", hf_folder("qwen2_5_vl"), imported("qwen2_5_vl")) == 0
    assert capsys.readouterr().out == "text: logits are equal\nimage: logits are equal\n"

    # A bias of the tower is seen on an image alone.
    bias = "visual.merger.mlp.2.bias"
    other = changed(hf_folder("qwen2_5_vl"), tmp_path / "other", **{bias: lambda x: x + 0.1})
    assert verify("--logits", imported("qwen2_5_vl"), other, "--json") == 1
    text, image = json.loads(capsys.readouterr().out)["logits"]
    assert text["largest"] == 0 < image["largest"]
    assert 0 < image["relative"] < 1 and image["position"] > 0 and image["token"]
    assert verify("--logits", imported("qwen2_5_vl"), other, "--tolerance", "1") == 0
    assert "of the largest, at token" in capsys.readouterr().out


FINAL_NORM = "model.norm.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused_and_their_side_is_named(
    hf_folder: Folder, tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hf_folder("qwen2_5_vl")
    capsys.readouterr()  # of the fixture
    other = changed(hf, tmp_path / "other", **{FINAL_NORM: set_entry((3,), value)})
    for sides in ((hf, other), (other, hf), (other, other)):
        assert verify("--logits", *sides, "--json") == 2
        assert sentence(capsys).startswith(f"{other} has logits on the text prompt that are NaN or")


def test_logits_of_zero_are_compared(
    hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hf_folder("qwen2_5_vl")
    zero = changed(hf, tmp_path / "zero", **{FINAL_NORM: torch.zeros_like})
    for sides, code, relative in (((zero, zero), 0, 0.0), ((zero, hf), 1, 1.0), ((hf, zero), 1, 1)):
        assert verify("--logits", *sides, "--json") == code
        for found in json.loads(capsys.readouterr().out)["logits"]:
            assert found["relative"] == relative


def test_logits_of_two_families_are_refused(
    hf_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = hf_folder("qwen2_5_vl"), hf_folder("qwen2_vl")
    capsys.readouterr()  # of the fixture
    assert verify("--logits", a, b) == 2
    message = f"{a} is a qwen2_5_vl and {b} a qwen2_vl: only logits of one family can be compared."
    assert sentence(capsys) == message


def test_a_comparison_that_is_stopped_leaves_no_model(
    imported: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(folder: Path) -> None:
        assert list(tmp_path.glob("megavlm-verify-*/hf/config.json"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compare_logits, "_inputs", stopped)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert verify("--logits", imported("qwen2_vl"), imported("qwen2_vl")) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_neither_is_one_sentence(
    imported: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "empty", "is neither a HuggingFace model folder nor a checkpoint."),
        (tmp_path / "nowhere", "is not a folder."),
    ):
        assert verify(imported("qwen2_vl"), folder) == 2
        assert capsys.readouterr().err == f"error: {folder} {message}\n"


FLAGS = (True, False, None)


@pytest.mark.parametrize(
    ("family", "top", "text"),
    [
        *((ADAPTED, True, text) for text in FLAGS),
        (ADAPTED, False, True),
        ("qwen3_vl", True, False),
        ("qwen3_omni_moe", True, True),
        *slow(*((ADAPTED, top, text) for top in (False, None) for text in FLAGS)),
        *slow(*(("qwen3_5", top, text) for top in FLAGS for text in FLAGS)),
    ],
)
def test_a_head_that_is_not_the_embedding_is_kept_as_transformers_keeps_it(
    family: str, top: bool | None, text: bool | None, hf_folder: Folder, tmp_path: Path
) -> None:
    """Whatever the flags of config.json say, which are set right in what is written."""
    head = f"{'thinker.' if family == 'qwen3_omni_moe' else ''}lm_head.weight"
    hf = changed(hf_folder(family), tmp_path / "hf", **{head: lambda x: x + 0.5})
    config = json.loads((hf / "config.json").read_text())
    model: Any = model_values(config)
    for section, flag in ((model, top), (model["text_config"], text)):
        section.pop("tie_word_embeddings", None)
        if flag is not None:
            section["tie_word_embeddings"] = flag
    (hf / "config.json").write_text(json.dumps(config))
    import_hf(hf, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert verify("--logits", hf, tmp_path / "out") == 0
    before, after = HFFolder(hf), HFFolder(tmp_path / "out")
    assert torch.equal(before[head], after[head])
    assert not model_config(tmp_path / "out").tie_word_embeddings

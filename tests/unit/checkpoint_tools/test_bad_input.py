"""Model folders that cannot be right: one sentence, exit code 2, nothing written."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.models.common import hf_source
from megavlm.models.common.hf_source import SINGLE, HFFolder
from megavlm.models.common.loading import Form
from tests.conftest import LFS_POINTER
from tests.unit.checkpoint_tools.command import run, sentence
from tests.unit.checkpoint_tools.conftest import Folder

MOE = "qwen3_vl_moe"
NORM = "model.language_model.norm.weight"
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
K_PROJ = "model.language_model.layers.0.self_attn.k_proj.weight"
Tensors = dict[str, torch.Tensor]
ADDED = {
    "id": 999999,
    "content": "<more>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


@pytest.fixture
def hf(hf_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folder(MOE), tmp_path / "hf"))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def shard(folder: Path) -> None:
    """Into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(places.values()):
        save_file({k: x for k, x in tensors.items() if places[k] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "part-1.safetensors").unlink()


def lose_a_tensor_of_a_shard(folder: Path) -> None:
    shard(folder)
    path = folder / "part-0.safetensors"
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def pickle(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def configure_text(folder: Path, **values: object) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config=text | values)


def other_family(folder: Path, source: Path) -> None:
    """The weights of one family under the configuration of another."""
    shutil.copyfile(source / "config.json", folder / "config.json")


def rewrite_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A function that changes the values of a folder's file, or makes the file."""

    def rewrite_file(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.is_file() else {}
        change(values)
        path.write_text(json.dumps(values))

    return rewrite_file


CONTRADICTIONS = {
    "patch size": (
        rewrite_json("preprocessor_config.json", lambda x: x.update(patch_size=14)),
        r"preprocessor_config\.json has patch_size=14, but .* vision_config\.patch_size=16",
    ),
    "merge size": (
        rewrite_json("preprocessor_config.json", lambda x: x.update(merge_size=4)),
        r"has merge_size=4, but config\.json has vision_config\.spatial_merge_size=2",
    ),
    "temporal patch size": (
        rewrite_json("video_preprocessor_config.json", lambda x: x.update(temporal_patch_size=1)),
        r"video_preprocessor_config\.json has temporal_patch_size=1, but .*temporal_patch_size=2",
    ),
    "processors in one file": (
        rewrite_json(
            "processor_config.json", lambda x: x.update(image_processor={"patch_size": 8})
        ),
        r"processor_config\.json has patch_size=8, but config\.json has",
    ),
    "image token": (
        rewrite_json("config.json", lambda x: x.update(image_token_id=7)),
        r"config\.json has image_token_id=7, but <\|image_pad\|> is token \d+ of tokenizer\.json",
    ),
    "vocabulary smaller than the tokenizer's": (
        rewrite_json("tokenizer.json", lambda x: x["added_tokens"].append(ADDED)),
        r"tokenizer\.json has token 999999 \(<more>\), but .* an embedding of vocab_size=\d+",
    ),
    "end of generation": (
        rewrite_json("generation_config.json", lambda x: x.update(eos_token_id=[1, 999999])),
        r"generation_config\.json has eos_token_id=\[1, 999999\], but .* vocab_size=\d+",
    ),
    "no JSON": (
        lambda hf: (hf / "preprocessor_config.json").write_text("{"),
        r"preprocessor_config\.json is not JSON",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_files_that_contradict_the_configuration(
    case: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = CONTRADICTIONS[case]
    change(hf)
    refused(tmp_path, message, capsys)


CASES = {
    "missing shard": (lose_a_shard, r"part-1\.safetensors is missing: .* places \d+ tensors in it"),
    "missing in shard": (lose_a_tensor_of_a_shard, r"part-0\.safetensors does not hold .*\.weight"),
    "truncated": (truncate, r"model\.safetensors is not a complete safetensors file"),
    "pickle": (pickle, r"pytorch_model\.bin.* loading them can run any code"),
    "unknown key": (
        lambda hf: rewrite(hf, lambda tensors: tensors.update(extra=torch.ones(2))),
        r"extra in .*model\.safetensors is not a tensor of the model that its config\.json",
    ),
    "missing key": (
        lambda hf: rewrite(hf, lambda tensors: tensors.pop(NORM)),
        rf"has no tensor {NORM}, but its config\.json needs it",
    ),
    "wrong shape": (
        lambda hf: rewrite(hf, lambda tensors: tensors.update({NORM: torch.ones(5)})),
        rf"{NORM} in .* has shape \(5,\); config\.json makes it \(128,\)",
    ),
    "dtype that is not read": (
        lambda hf: save_arrays({"x": np.ones(2, np.uint16)}, hf / "model.safetensors"),
        r"model\.safetensors holds x as U16; only F64, F32, F16, BF16, .* are supported",
    ),
    "unknown family": (
        lambda hf: configure(hf, model_type="llava"),
        r"config\.json: model_type 'llava' is not supported: use one of glm4v, glm4v_moe",
    ),
    "families in a list": (
        lambda hf: configure(hf, model_type=[MOE]),
        r"config\.json: model_type \['qwen3_vl_moe'\] is not supported: use one of",
    ),
    "byte-order mark": (
        lambda hf: (hf / "config.json").write_bytes(
            b"\xef\xbb\xbf" + (hf / "config.json").read_bytes()
        ),
        r"config\.json' is not a valid JSON file\.$",
    ),
    "no configuration": (
        lambda hf: (hf / "config.json").unlink(),
        r"is not a HuggingFace model folder: No such file or directory: .*/config\.json",
    ),
    "no weights": (
        lambda hf: (hf / "model.safetensors").unlink(),
        r"holds neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "no heads": (
        lambda hf: configure_text(hf, num_attention_heads=0),
        r"config\.json has num_attention_heads=0: it must be at least 1",
    ),
    "no key-value heads": (
        lambda hf: configure_text(hf, num_key_value_heads=0),
        r"config\.json has num_key_value_heads=0: it must be at least 1",
    ),
    "no such dtype": (
        lambda hf: configure(hf, dtype="float99"),
        r"config\.json has dtype='float99', but torch has no such dtype",
    ),
    "no such dtype of a part": (
        lambda hf: configure_text(hf, torch_dtype="Tensor"),
        r"config\.json has torch_dtype='Tensor', but torch has no such dtype",
    ),
    "one key of two dtypes": (
        lambda hf: rewrite(
            hf,
            lambda tensors: tensors.update(
                {
                    "model.language_model.layers.0.self_attn.k_proj.weight": torch.ones(
                        64, 128
                    ).half()
                }
            ),
        ),
        r"q_proj.*k_proj.*v_proj.* make one tensor, but have different dtypes",
    ),
}


def refused(tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()  # of the fixtures
    assert run("import", tmp_path / "hf", tmp_path / "checkpoint") == 2
    assert re.search(message, sentence(capsys))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_folder_is_one_sentence(
    case: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = CASES[case]
    spoil(hf)
    refused(tmp_path, message, capsys)


@pytest.mark.parametrize(
    ("config_of", "message"),
    [
        ("qwen2_vl", r"has no tensor visual\.blocks\.0\.mlp\.fc1\.weight \(and \d+ more\)"),
        ("qwen3_vl", r"has no tensor model\.language_model\.layers\.0\.mlp\.gate_proj\.weight"),
    ],
)
def test_weights_of_another_family_than_the_configuration(
    config_of: str,
    message: str,
    hf: Path,
    hf_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other_family(hf, hf_folder(config_of))
    refused(tmp_path, message, capsys)


def unstack(tensors: Tensors) -> None:
    """A tensor for each expert and projection, [out, in]."""
    for name in [name for name in tensors if ".experts." in name]:
        layer = name.rpartition(".")[0]
        for number, row in enumerate(tensors.pop(name)):
            parts = {"down_proj": row.t()}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), row.t().chunk(2), strict=True))
            for part, x in parts.items():
                tensors[f"{layer}.{number}.{part}.weight"] = x.contiguous().clone()


def transpose(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].mT.contiguous()


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (unstack, "hub"),
        (unstack, "memory"),
        (unstack, None),
        (transpose, "memory"),
        (transpose, None),
    ],
)
def test_experts_in_every_layout_become_one_checkpoint(
    change: Callable[[Tensors], None],
    form: Form | None,
    hf: Path,
    hf_folder: Folder,
    tmp_path: Path,
) -> None:
    """Unstacked experts are recognised by their keys, and the format of stacks by their shapes."""
    rewrite(hf, change)
    import_hf(hf, tmp_path / "checkpoint", experts=form)
    export_hf(tmp_path / "checkpoint", tmp_path / "out", options=WriteOptions(experts="hub"))
    before, after = HFFolder(hf_folder(MOE)), HFFolder(tmp_path / "out")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", ["hub", "memory"])
def test_experts_come_back_in_the_form_they_came_in_or_as_asked(
    form: Form, hf: Path, hf_folder: Folder, tmp_path: Path
) -> None:
    other: Form = "memory" if form == "hub" else "hub"
    if form == "memory":
        rewrite(hf, transpose)
    checkpoint = tmp_path / "checkpoint"
    assert run("import", hf, checkpoint, "--quiet") == 0
    assert run("export", checkpoint, tmp_path / "same", "--quiet") == 0
    assert run("export", checkpoint, tmp_path / "other", "--experts", other, "--quiet") == 0
    came, same, turned = (
        load_file(path / SINGLE) for path in (hf, tmp_path / "same", tmp_path / "other")
    )
    assert came.keys() == same.keys() == turned.keys()
    assert all(torch.equal(came[name], same[name]) for name in came)
    transpose(turned)
    assert all(torch.equal(came[name], turned[name]) for name in came)


@pytest.mark.parametrize("part", [None, "thinker_config"])
def test_quantised_weights_are_refused(
    part: str | None, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((hf / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (hf / "config.json").write_text(json.dumps(config | ({part: quantised} if part else quantised)))
    refused(
        tmp_path, r"describes quantised weights \(fp8\), .*: take the model in bfloat16", capsys
    )


def test_a_pointer_of_git_lfs_is_named(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hf / SINGLE).write_bytes(LFS_POINTER)
    refused(tmp_path, r"model.safetensors: a git-LFS pointer .* `git lfs pull`", capsys)


@pytest.mark.parametrize("form", ["hub", "memory"])
def test_a_square_stack_is_read_in_the_form_of_the_other(
    form: Form, hf: Path, tmp_path: Path
) -> None:
    """With H = 2I gate_up_proj looks alike in both forms, and down_proj does not."""
    configure_text(hf, moe_intermediate_size=64)

    def square(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("gate_up_proj")]:
            tensors[name] = tensors[name][..., :128].contiguous()
            down = name.replace("gate_up", "down")
            tensors[down] = tensors[down][:, :64].contiguous()

    rewrite(hf, square)
    if form == "memory":
        rewrite(hf, transpose)
    other: Form = "memory" if form == "hub" else "hub"
    with pytest.raises(ValueError, match=rf"down_proj .* form of .* --experts {form}"):
        import_hf(hf, tmp_path / "checkpoint", experts=other)
    import_hf(hf, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    before, after = HFFolder(hf), HFFolder(tmp_path / "out")
    assert before.shape(GATE_UP) == (8, 128, 128) and before.shape(DOWN) == (
        (8, 64, 128) if form == "hub" else (8, 128, 64)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_folder_saved_by_transformers_is_imported(
    family: str, loaded: bool, hf_folder: Folder, tmp_path: Path
) -> None:
    """Of a model that was loaded from a folder, and of one that was made in memory."""
    source, saved = hf_folder(family), tmp_path / "saved"
    shutil.copytree(source, saved, ignore=shutil.ignore_patterns("*.safetensors"))
    kind = AutoModelForImageTextToText
    model = kind.from_pretrained(source)
    if not loaded:
        made = kind.from_config(model.config)
        made.load_state_dict(model.state_dict())
        model = made
    model.save_pretrained(saved)
    assert run("import", saved, tmp_path / "checkpoint", "--quiet") == 0
    assert run("verify", source, tmp_path / "checkpoint", "--quiet") == 0


def test_a_file_that_may_not_be_read_is_not_called_incomplete(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hf_source, "safe_open", forbidden)
    refused(tmp_path, r"model\.safetensors cannot be read: .*Permission denied", capsys)

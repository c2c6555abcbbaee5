"""Folders in the form of a model's authors: imported, exported and turned into transformers' form
and back, bit for bit.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.compare_logits import compare_logits
from checkpoint_tools.compare_weights import compare_weights
from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.weights import open_both, step_weights
from megavlm.checkpointing.folder import check_family, locate_step
from megavlm.families import family_of
from tests.parity.models import model_folder

KINDS = ("internvl", "internvl_moe")
FIXED = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
}
WORDS = (
    (r"^vision_tower\.embeddings", "vision_model.embeddings"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.([qk]_norm)", r"attn.\1"),
    (r"lambda_", "ls"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)


def authors_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and fuse tensors of transformers' form, as the authors' own converter takes apart."""
    found = {}
    for name, tensor in tensors.items():
        if re.search(r"attention\.[kv]_proj", name):
            continue
        if "attention.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            name, tensor = name.replace("attention.q_proj", "attn.qkv"), torch.cat(parts)
        name = FIXED.get(name, name)
        for old, new in WORDS:
            name = re.sub(old, new, name)
        found[name] = tensor.contiguous()
    return found


def authors_config(values: dict[str, Any]) -> dict[str, Any]:
    text, vision = values["text_config"], values["vision_config"]
    return {
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": values["downsample_ratio"],
        "force_image_size": vision["image_size"][0],
        "llm_config": text,
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "vision_config": {
            "hidden_act": vision["hidden_act"],
            "hidden_size": vision["hidden_size"],
            "image_size": vision["image_size"][0],
            "initializer_factor": 0.1,
            "intermediate_size": vision["intermediate_size"],
            "layer_norm_eps": vision["layer_norm_eps"],
            "model_type": "intern_vit_6b",
            "norm_type": vision["norm_type"],
            "num_attention_heads": vision["num_attention_heads"],
            "num_hidden_layers": vision["num_hidden_layers"],
            "patch_size": vision["patch_size"][0],
            "qk_normalization": vision["use_qk_norm"],
            "qkv_bias": vision["attention_bias"],
        },
    }


def make_authors_folder(hf: Path, folder: Path) -> Path:
    folder.mkdir()
    values = json.loads((hf / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(authors_config(values), indent=2) + "\n")
    shutil.copy(hf / "tokenizer.json", folder)
    tensors = authors_tensors(load_file(hf / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_become_each_other_bit_for_bit(kind: str, tmp_path: Path) -> None:
    hf = model_folder(kind)
    authors = make_authors_folder(hf, tmp_path / "authors")
    import_hf(authors, tmp_path / "from_authors")
    import_hf(hf, tmp_path / "from_hf")
    ours, theirs = (step_weights(tmp_path / x) for x in ("from_authors", "from_hf"))
    assert ours.groups.keys() == theirs.groups.keys()
    assert all(torch.equal(ours.read(x), theirs.read(x)) for x in theirs.entries())
    assert compare_weights(*open_both(authors, hf)).different == 0

    small = WriteOptions(max_shard_bytes=2**20)
    export_hf(tmp_path / "from_authors", tmp_path / "authors_again", options=small)
    assert_same(tmp_path / "authors_again", authors)
    assert len([*(tmp_path / "authors_again").glob("*.safetensors")]) > 1
    export_hf(tmp_path / "from_authors", tmp_path / "hf", like=hf)
    assert_same(tmp_path / "hf", hf)
    export_hf(tmp_path / "from_hf", tmp_path / "as_authors", like=authors)
    assert_same(tmp_path / "as_authors", authors)
    before, after = (
        json.loads((x / "config.json").read_text()) for x in (authors, tmp_path / "as_authors")
    )
    assert before == after


def test_runs_need_transformers_form_and_take_the_authors_weights(tmp_path: Path) -> None:
    hf = model_folder("internvl")
    authors = make_authors_folder(hf, tmp_path / "authors")
    with pytest.raises(ValueError, match="'internvl_chat' is the form of the model's authors"):
        family_of(authors)
    import_hf(authors, tmp_path / "checkpoint")
    check_family(locate_step(tmp_path / "checkpoint", None), "internvl")
    with pytest.raises(ValueError, match="has the form of the model's authors, and logits"):
        compare_logits(authors, hf)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ps_version": "v1"}, r"ps_version: 'v1' orders the patches"),
        (
            {"llm_config": {"model_type": "internlm2"}},
            "model_type: 'internlm2' is not supp",
        ),
        ({"vision_config": {}}, "has no 'hidden_size'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \(fp8\)"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = make_authors_folder(model_folder("internvl"), tmp_path / "authors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=problem):
        import_hf(folder, tmp_path / "checkpoint")

"""HF weights against a mapping: names and layouts that are read alike, sentences for what is wrong,
and each rank's slices in the model.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from megavlm.demo.tiny_model import make_tiny_model
from megavlm.model_config import model_config
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import HUB, MEMORY, HubTensors, load_hf, local_tensors
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.parallel.mesh import Layout, build_mesh
from tests.support.families import FAMILIES, build_in_transformers, entries_of, small_config
from tests.support.fork import launch

STACKS = "model.language_model.layers.0.mlp.experts"


def make(folder: Path, family: str = "qwen2_5_vl", **options: Any) -> Path:
    options = {"num_layers": 2, "vision_depth": 1, "hidden_size": 64, "ffn_size": 96} | options
    make_tiny_model(
        folder, ["red"], seed=0, family=family, randomise_norms_and_biases=True, **options
    )
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "hf"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen3_vl_moe"), "qwen3_vl_moe", dense_layers=[1])


def read_mapping(folder: Path) -> list[Entry]:
    return entries_of(model_config(folder))


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replaces tensors in the folder's only weight file; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_and_files_give_the_same_tensors(family: str, tmp_path: Path) -> None:
    """transformers' own loading defines what the names and layouts in files mean."""
    make(tmp_path, family)
    from transformers import AutoModelForImageTextToText

    config = model_config(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, config=config)
    entries = read_mapping(tmp_path)
    files = HubTensors(entries, HFFolder(tmp_path))
    memory = HubTensors(entries, model.state_dict(), MEMORY)
    for entry in entries:
        assert torch.equal(files.read(entry), memory.read(entry)), entry.megatron


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A hub form's tensors with one for each expert's projection."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, row in enumerate(tensor):
                gate, up = row.t().chunk(2)
                result[f"{layer}.{i}.gate_proj.weight"] = gate.contiguous()
                result[f"{layer}.{i}.up_proj.weight"] = up.contiguous()
        elif layer.endswith(".experts"):
            for i, row in enumerate(tensor):
                result[f"{layer}.{i}.{kind}.weight"] = row.t().contiguous()
        else:
            result[name] = tensor
    return result


def test_an_experts_tensor_that_is_missing_or_of_another_shape_is_named(moe: Path) -> None:
    entries, tensors = read_mapping(moe), unstacked(load_file(moe / "model.safetensors"))
    short = STACKS.replace("language_model.", "")
    up = f"{STACKS}.2.up_proj.weight"
    with pytest.raises(ValueError, match=rf"no tensor {short}\.2\.up_proj\.weight, but"):
        HubTensors(entries, {name: x for name, x in tensors.items() if name != up})
    with pytest.raises(ValueError, match=rf"{up} in .* has shape \(64, 48\); .* it \(48, 64\)"):
        HubTensors(entries, tensors | {up: tensors[up].t()})
    stack = load_file(moe / "model.safetensors")[f"{STACKS}.down_proj"]
    with pytest.raises(ValueError, match=rf"{STACKS}\.0\.down_proj\.weight \(and 3 more\)"):
        HubTensors(entries, tensors | {f"{STACKS}.down_proj": stack})


@pytest.mark.parametrize("ffn", [32, 64])
def test_a_wrong_form_is_refused_where_one_stack_is_square(ffn: int) -> None:
    config = small_config("qwen3_vl_moe")
    config.text_config.moe_intermediate_size = ffn  # of hidden size 64: gate_up or down is square
    entries, tensors = entries_of(config), build_in_transformers(config).state_dict()
    HubTensors(entries, tensors, MEMORY)
    with pytest.raises(ValueError, match=r"form of megavlm-convert import --experts memory"):
        HubTensors(entries, tensors, HUB)


def test_one_tensor_under_two_names_is_refused(folder: Path) -> None:
    rewrite(folder, **{"model.language_model.norm.weight": torch.zeros(64)})
    with pytest.raises(ValueError, match="under two names"):
        HubTensors(read_mapping(folder), HFFolder(folder))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tied_head_written_twice_must_agree(family: str, tmp_path: Path) -> None:
    make(tmp_path, family, tied_embeddings=True)
    prefix = "model" if family == "qwen2_5_vl" else "model.language_model"
    embedding = load_file(tmp_path / "model.safetensors")[f"{prefix}.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embedding.clone()})
    HubTensors(read_mapping(tmp_path), HFFolder(tmp_path))
    rewrite(tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        HubTensors(read_mapping(tmp_path), HFFolder(tmp_path))


def loaded(folder: Path, layout: Layout, dtype: torch.dtype) -> set[tuple[str, int | None]]:
    """What this rank holds, each found to be its slice of the folder's tensor."""
    mesh = build_mesh(layout)
    config = AutoConfig.from_pretrained(folder)
    entries = read_mapping(folder)
    table = {(entry.megatron, entry.expert): entry for entry in entries}
    tensors = HubTensors(entries, HFFolder(folder))
    seen = set()
    options = ModelOptions(dtype=dtype, sequence=layout.tensor > 1)
    for chunk in build_model(config, mesh, options):
        load_hf(chunk, entries, HFFolder(folder), mesh)
        for target in local_tensors(chunk):
            entry = table[target.key, target.expert]
            place = mesh.place(entry.shard.axis)
            expected = shard_tensor(entry, tensors.read(entry), *place).to(dtype)
            assert torch.equal(target.data, expected), target.key
            seen.add((target.key, target.expert))
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "options", "layout", "world"),
    [
        ("qwen2_vl", {}, Layout(tensor=2), 2),
        ("qwen2_5_vl", {"tied_embeddings": True}, Layout(), 1),
        ("qwen2_5_vl", {"tied_embeddings": True}, Layout(pipeline=2), 2),
        ("qwen3_vl", {"head_dim": 32}, Layout(tensor=2), 2),
        ("qwen3_vl", {"num_layers": 4}, Layout(pipeline=2, virtual=2), 2),
        ("qwen3_vl_moe", {"dense_layers": [1]}, Layout(), 1),
        ("qwen3_vl_moe", {"dense_layers": [1]}, Layout(expert=2), 2),
        ("qwen3_vl_moe", {}, Layout(tensor=2, expert_tensor=2), 2),
        ("qwen3_vl_moe", {}, Layout(tensor=2, expert=2), 2),
    ],
)
def test_the_ranks_hold_every_tensor_in_slices(
    family: str, options: dict[str, Any], layout: Layout, world: int, tmp_path: Path
) -> None:
    make(tmp_path, family, **options)
    expected = {(entry.megatron, entry.expert) for entry in read_mapping(tmp_path)}
    for dtype in (torch.float32, torch.bfloat16):
        ranks = launch(world, loaded, tmp_path, layout, dtype)
        assert set().union(*ranks) == expected
        if layout.pipeline == layout.expert == 1:
            assert all(rank == expected for rank in ranks)

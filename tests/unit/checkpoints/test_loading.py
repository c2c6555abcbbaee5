"""HF folders: read lazily, under either naming; refused with a sentence where they are wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.loading import HFFolder, HubTensors, load_hf
from megavlm.models.common.mapping import Entry, unshard
from megavlm.models.qwen2_5_vl.mapping import mapping
from tests.distributed.fork import launch
from tests.unit.checkpoints.ranks import make_hf, start

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_tiny_model(folder, ["red blue"] * 10, seed=0, num_layers=1, vision_depth=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "hf"))


def entries_of(folder: Path) -> list[Entry]:
    return mapping(AutoConfig.from_pretrained(folder))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors in the folder's only weight file; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


def split(folder: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file_name in set(places.values()):
        part = {name: x for name, x in tensors.items() if places[name] == file_name}
        save_file(part, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_sharded_files_read_like_a_single_one(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    split(folder)
    tensors = HFFolder(folder)
    assert set(tensors) == set(expected) and len(tensors) == len(expected)
    assert all(torch.equal(tensors[name], x) for name, x in expected.items())


def test_both_namings_give_the_same_tensors(folder: Path) -> None:
    entries = entries_of(folder)
    hub = load_file(folder / "model.safetensors")
    in_memory = {}
    for name, tensor in hub.items():
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        in_memory[name] = tensor
    for entry in entries:
        first, second = (HubTensors(entries, source).read(entry) for source in (hub, in_memory))
        assert torch.equal(first, second), entry.megatron


def test_a_missing_shard_is_named(folder: Path) -> None:
    split(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1\.safetensors is missing: .* places \d+ tensors"):
        HFFolder(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    split(folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.extra"] = "part-0.safetensors"
    index.write_text(json.dumps(places))
    with pytest.raises(ValueError, match=r"part-0\.safetensors does not hold model\.extra"):
        HFFolder(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index"):
        HFFolder(folder)


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../a.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"'\.\./a\.safetensors', which is not a file of this"):
        HFFolder(folder)


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        HFFolder(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model\.bin\)"):
        HFFolder(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"):
        HFFolder(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        HFFolder(tmp_path / "nowhere")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{Q: None, "model.norm.weight": None})
    with pytest.raises(ValueError, match=rf"{folder} has no tensor {Q} \(and 1 more\)"):
        HubTensors(entries_of(folder), HFFolder(folder))


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.7.mystery": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"mystery in .*model\.safetensors is no tensor of the"):
        HubTensors(entries_of(folder), HFFolder(folder))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, **{Q: torch.zeros(3, 5)})
    entries = entries_of(folder)
    entry = next(entry for entry in entries if Q in entry.hf)
    tensors = HubTensors(entries, HFFolder(folder))
    with pytest.raises(ValueError, match=rf"{Q} in .*safetensors has shape \(3, 5\).*\(128, 128\)"):
        tensors.read(entry)


def test_one_tensor_under_two_names_is_refused(folder: Path) -> None:
    rewrite(folder, **{"model.language_model.norm.weight": torch.zeros(128)})
    with pytest.raises(ValueError, match="under two names"):
        HubTensors(entries_of(folder), HFFolder(folder))


def test_a_tied_head_written_twice_must_agree(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["red"], seed=0, num_layers=1, vision_depth=1, tied_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embedding.clone()})
    HubTensors(entries_of(tmp_path), HFFolder(tmp_path))
    rewrite(tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        HubTensors(entries_of(tmp_path), HFFolder(tmp_path))


def loaded_weights(folder: Path, tensor: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = start(folder, tensor, dtype=dtype).weights()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    return {key: weight.float() for key, weight in weights.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ranks_hold_every_tensor_in_shards(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    """Nothing of the model is left as it was initialised, and nothing of the folder is left out."""
    folder = make_hf(tmp_path / "hf", tied_embeddings=tied)
    table = {entry.megatron: entry for entry in entries_of(folder)}
    tensors = HubTensors(list(table.values()), HFFolder(folder))
    for tensor in (1, 2):
        ranks = launch(tensor, loaded_weights, folder, tensor, dtype)
        assert all(weights.keys() == table.keys() for weights in ranks)
        for key, entry in table.items():
            full = unshard(entry, [torch.as_tensor(weights[key]) for weights in ranks])
            assert torch.equal(full, tensors.read(entry).to(dtype).float()), key


def too_small(folder: Path, source: Path) -> str:
    run = start(folder, 1)
    try:
        load_hf(run.model, list(run.table.values()), HFFolder(source), 0, 1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_weights_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    narrow, wide = make_hf(tmp_path / "narrow"), make_hf(tmp_path / "wide", hidden_size=256)
    (message,) = launch(1, too_small, narrow, wide)
    assert "visual.merger.mlp.2.weight" in message or "embed_tokens" in message
    assert "model.safetensors has shape" in message

"""The mapping table: transforms are lossless, shards join, and every HF tensor is covered once."""

from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig

from megavlm.models.common.mapping import Entry, fused_qkv, gated, shard_tensor, unshard
from megavlm.models.qwen2_5_vl.mapping import mapping
from megavlm.parallel.torchvision_ops import define_torchvision_operators

# layers, hidden, heads, key-value heads, ffn, vocabulary, tied, vision ffn
RELEASED = {
    "3B": (36, 2048, 16, 2, 11008, 151936, True, 3420),
    "7B": (28, 3584, 28, 4, 18944, 152064, False, 3420),
    "32B": (64, 5120, 40, 8, 27648, 152064, False, 3456),
    "72B": (80, 8192, 64, 8, 29568, 152064, False, 3456),
}


def tiny_config(*, tied: bool = False) -> Qwen2_5_VLConfig:
    return make_config(2, 64, 8, 4, 96, 128, tied, 48, vision_hidden=32, vision_depth=2)


def make_config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    tied: bool,
    vision_ffn: int,
    vision_hidden: int = 1280,
    vision_depth: int = 32,
) -> Qwen2_5_VLConfig:
    text = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": vision_depth,
        "hidden_size": vision_hidden,
        "intermediate_size": vision_ffn,
        "out_hidden_size": hidden,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def random_hf(entry: Entry) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in entry.hf_shapes]


@pytest.mark.parametrize("tied", [False, True])
def test_transforms_are_lossless(tied: bool) -> None:
    for entry in mapping(tiny_config(tied=tied)):
        tensors = random_hf(entry)
        full = entry.to_megatron(tensors)
        assert tuple(full.shape) == entry.megatron_shape
        for name, there_and_back, tensor in zip(entry.hf, entry.to_hf(full), tensors, strict=True):
            assert torch.equal(there_and_back, tensor), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_equal_pieces_that_join(size: int) -> None:
    for entry in mapping(tiny_config()):
        full = entry.to_megatron(random_hf(entry))
        shards = [shard_tensor(entry, full, rank, size) for rank in range(size)]
        pieces = 1 if entry.shard.dim is None else size
        assert {shard.numel() for shard in shards} == {full.numel() // pieces}, entry.megatron
        assert torch.equal(unshard(entry, shards), full), entry.megatron


def test_qkv_lies_by_key_value_group() -> None:
    """Four query heads, two groups, head size 1: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    entry = fused_qkv("qkv", ["q", "k", "v"], [(4,), (2,), (2,)], num_groups=2)
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    full = entry.to_megatron([q, k, v])
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard_tensor(entry, full, 1, 2).tolist() == [2, 3, 11, 21]


def test_each_rank_holds_its_piece_of_gate_and_of_up() -> None:
    entry = gated("fc1", "gate", "up", (4,))
    full = entry.to_megatron([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])])
    assert shard_tensor(entry, full, 0, 2).tolist() == [0, 1, 10, 11]
    assert shard_tensor(entry, full, 1, 2).tolist() == [2, 3, 12, 13]


def test_a_size_that_does_not_divide_is_refused() -> None:
    entry = gated("fc1.weight", "gate", "up", (6, 1))
    with pytest.raises(ValueError, match=r"fc1\.weight has shape \(12, 1\).* 8 equal pieces"):
        shard_tensor(entry, torch.zeros(12, 1), 0, 4)


@pytest.mark.parametrize("release", RELEASED)
def test_every_tensor_of_transformers_is_covered_once(release: str) -> None:
    model = build_in_transformers(make_config(*RELEASED[release]))
    expected = {hub_name(name): tuple(x.shape) for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    entries = mapping(model.config)
    covered = [pair for e in entries for pair in zip(e.hf, e.hf_shapes, strict=True)]
    assert len(covered) == len({name for name, _ in covered})
    assert len(entries) == len({entry.megatron for entry in entries})
    assert dict(covered) == expected


def test_names_are_those_that_transformers_writes(tmp_path: Any) -> None:
    from safetensors import safe_open

    define_torchvision_operators()
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = tiny_config()
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name for entry in mapping(config) for name in entry.hf} == set(file.keys())


def build_in_transformers(config: Qwen2_5_VLConfig) -> Any:
    """A transformers model without memory: its parameters are on the meta device."""
    define_torchvision_operators()
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(config)


def hub_name(name: str) -> str:
    """transformers 5's name in memory -> the name in hub files."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")

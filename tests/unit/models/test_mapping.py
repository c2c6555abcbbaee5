"""The mapping tables: transforms are lossless, shards join, and names are the hub's."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from megavlm.models.common.loading import HUB, written_shapes
from megavlm.models.common.mapping import (
    COLUMNS,
    EXPERT_COLUMNS,
    EXPERT_GATED,
    Entry,
    by_key,
    fused_qkv,
    gated,
    keeps_order,
    shard_tensor,
    stacked,
    unshard,
)
from megavlm.models.linear_attention.fused_rows import group_rows, join_gated
from tests.support.families import FAMILIES, build_in_transformers, entries_of, small_config

every_family = pytest.mark.parametrize("family", FAMILIES)


def random_hf(entry: Entry) -> list[Tensor]:
    """What `to_megatron` takes: of an expert's stacks the rows."""
    shapes = [shape if entry.expert is None else shape[1:] for shape in entry.hf_shapes]
    return [torch.randn(shape) for shape in shapes]


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_transforms_are_lossless_and_shards_join(family: str, tied: bool) -> None:
    for entry in entries_of(small_config(family, tied_embeddings=tied)):
        tensors = random_hf(entry)
        full = entry.to_megatron(tensors)
        assert tuple(full.shape) == entry.megatron_shape
        for size in (1, 2, 4):
            shards = [shard_tensor(entry, full, rank, size) for rank in range(size)]
            pieces = 1 if entry.shard.dim is None else size
            assert {shard.numel() for shard in shards} == {full.numel() // pieces}, entry.megatron
            joined = unshard(entry, shards)
            assert torch.equal(joined, full), entry.megatron
            for name, back, tensor in zip(entry.hf, entry.to_hf(joined), tensors, strict=True):
                assert torch.equal(back, tensor), name


def test_qkv_lies_by_key_value_group() -> None:
    """Four query heads, two groups, head size 1: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    entry = fused_qkv("qkv", ["q", "k", "v"], [(4,), (2,), (2,)], num_groups=2)
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    full = entry.to_megatron([q, k, v])
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard_tensor(entry, full, 1, 2).tolist() == [2, 3, 11, 21]


def test_more_ranks_than_groups_cut_a_groups_rows() -> None:
    """As megatron-core's attention expects: it gathers the rows again."""
    entry = fused_qkv("qkv", ["q", "k", "v"], [(4,), (2,), (2,)], num_groups=2)
    full = torch.arange(8)
    assert [shard_tensor(entry, full, rank, 4).tolist() for rank in range(4)] == [
        [0, 1], [2, 3], [4, 5], [6, 7]
    ]  # fmt: skip


def test_each_rank_holds_its_piece_of_gate_and_of_up() -> None:
    entry = gated("fc1", "gate", "up", (4,))
    full = entry.to_megatron([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])])
    assert shard_tensor(entry, full, 0, 2).tolist() == [0, 1, 10, 11]
    assert shard_tensor(entry, full, 1, 2).tolist() == [2, 3, 12, 13]


def test_an_experts_row_of_the_hub_is_transposed() -> None:
    """H = 2, I = 2: the hub's columns are gate's and up's, Megatron's rows."""
    gate_up = stacked("fc1", "gate_up", (3, 2, 4), EXPERT_GATED, 1, transposed=True)
    full = gate_up.to_megatron([torch.tensor([[0, 1, 10, 11], [2, 3, 12, 13]])])
    assert full.tolist() == [[0, 2], [1, 3], [10, 12], [11, 13]]
    assert shard_tensor(gate_up, full, 1, 2).tolist() == [[1, 3], [11, 13]]
    assert gate_up.shard.axis == "expert_tensor" and gate_up.checkpoint_shape == (3, 4, 2)

    down = stacked("fc2", "down", (3, 2, 2), EXPERT_COLUMNS, 1, transposed=True)
    full = down.to_megatron([torch.tensor([[0, 1], [2, 3]])])
    assert full.tolist() == [[0, 2], [1, 3]]
    assert shard_tensor(down, full, 1, 2).tolist() == [[2], [3]]
    assert down.shard != COLUMNS and down.shard.dim == COLUMNS.dim


def test_an_experts_row_that_is_not_transposed() -> None:
    down = stacked("fc2", "down", (3, 2, 2), EXPERT_COLUMNS, 1, transposed=False)
    row = torch.tensor([[0, 1], [2, 3]])
    assert torch.equal(down.to_megatron([row]), row)


def test_rows_of_gated_delta_net_and_of_gated_attention() -> None:
    """By key head: q, k, v, z, b, a of the first, then of the second; of a key-value head all
    queries, then all gates, its key and its value.
    """
    layers = by_key(entries_of(small_config("qwen3_5")))
    (linear,) = layers["language_model.decoder.layers.0.self_attention.in_proj.weight"]
    (full,) = layers["language_model.decoder.layers.3.self_attention.linear_qkv.weight"]
    assert not keeps_order(linear) and not keeps_order(full)
    (plain,) = by_key(entries_of(small_config("qwen3_vl")))[
        "language_model.decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    assert keeps_order(plain)
    parts = [torch.tensor([0, 1, 10, 11, 20, 21, 22, 23]), torch.tensor([30, 31, 32, 33])]
    assert group_rows(2, (2, 2, 4), [x[:, None] for x in parts])[:, 0].tolist() == [
        0, 10, 20, 21, 30, 31, 1, 11, 22, 23, 32, 33
    ]  # fmt: skip
    query = torch.tensor([0, 100, 1, 101])[:, None]  # head by head, each with its gate
    joined = join_gated(1, 1, [query, torch.tensor([[2]]), torch.tensor([[3]])])
    assert joined[:, 0].tolist() == [0, 1, 100, 101, 2, 3]


def test_a_size_that_does_not_divide_is_refused() -> None:
    entry = gated("fc1.weight", "gate", "up", (6, 1))
    with pytest.raises(ValueError, match=r"shape \(12, 1\).* 8 equal .* a parallel\.tensor that"):
        shard_tensor(entry, torch.zeros(12, 1), 0, 4)
    entry = stacked("fc1", "gate_up", (1, 1, 6), EXPERT_GATED, 0, transposed=True)
    with pytest.raises(ValueError, match=r"6 equal pieces; choose a parallel\.expert_tensor that"):
        shard_tensor(entry, torch.zeros(6, 1)[:5], 0, 3)


def test_experts_of_a_layer_share_a_key() -> None:
    groups = by_key(entries_of(small_config("qwen3_vl_moe", num_experts=3)))
    decoder = "language_model.decoder.layers"
    experts = groups[f"{decoder}.0.mlp.experts.experts.linear_fc2.weight"]
    assert [entry.expert for entry in experts] == [0, 1, 2]
    assert f"{decoder}.0.pre_mlp_layernorm.weight" in groups
    assert f"{decoder}.0.mlp.router.weight" in groups
    # the dense layer
    assert f"{decoder}.1.mlp.linear_fc1.layer_norm_weight" in groups
    assert not any(key.startswith(f"{decoder}.1.mlp.experts") for key in groups)


def test_norms_are_not_swapped() -> None:
    """Of equal shapes, so that nothing else here would see it."""
    layer, decoder = "model.language_model.layers.0", "language_model.decoder.layers.0"
    groups = by_key(entries_of(small_config("qwen3_vl")))
    for key, name in {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    }.items():
        assert groups[f"{decoder}.{key}"][0].hf == (f"{layer}.{name}",)


@every_family
def test_names_are_those_that_transformers_writes(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    original = family != "qwen3_5_moe"  # whose hub files stack experts, as memory does
    build_in_transformers(config, "cpu").save_pretrained(tmp_path, save_original_format=original)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name for entry in entries_of(config) for name in written_shapes(entry, HUB)}
        # The files of some families hold the model as a part of another, with a prefix.
        prefix = "thinker." if config.model_type == "qwen3_omni_moe" else ""
        assert written == {f"{prefix}{name}" for name in file.keys()}

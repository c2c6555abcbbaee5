"""Portions, the bucket's layout, and the engine's tensors."""

import hashlib

import torch

from megavlm.models.common.mapping import ROWS, Shard, same
from megavlm.rollout.weights.plan import Item, portions
from megavlm.rollout.weights.transports.bucket import flatten
from megavlm.rollout.weights.verify import checksums, engine_tensors


def item(num_floats: int, shard: Shard = ROWS) -> Item:
    shard_tensor = torch.zeros(num_floats)
    return same(f"t{num_floats}", f"t{num_floats}", (num_floats,), shard), shard_tensor


def test_portions() -> None:
    """Bytes of full tensors: 2 ranks x 4 per float; a tensor above the bound is alone."""
    items = [item(n) for n in (2, 3, 30, 1, 4)]
    runs = [[len(shard) for _, shard in run] for run in portions(items, 2, 40)]
    assert runs == [[2, 3], [30], [1, 4]]
    replicated = [item(5, Shard(None)), item(4, Shard(None))]
    assert len(list(portions(replicated, 2, 36))) == 1
    assert list(portions([], 2, 36)) == []


def test_bucket() -> None:
    tensors = [
        ("a", torch.arange(6.0).view(2, 3).t()),  # not contiguous
        ("b", torch.tensor([1.5], dtype=torch.bfloat16)),
        ("c", torch.tensor(7.0, dtype=torch.float64)[None]),
    ]
    flat, places = flatten(tensors)
    assert flat.dtype == torch.uint8 and len(flat) == 24 + 2 + 8
    for (name, tensor), place in zip(tensors, places, strict=True):
        part = flat[place.start_idx : place.end_idx].clone().view(place.dtype).view(place.shape)
        assert place.name == name and torch.equal(part, tensor)


def test_engine_tensors() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.ones(70, 2),
        "l.self_attn.q_proj.bias": torch.tensor([1.0, 2.0]),
        "l.self_attn.k_proj.bias": torch.tensor([3.0]),
        "l.self_attn.v_proj.bias": torch.tensor([4.0]),
        "l.mlp.gate_proj.weight": torch.ones(2, 3),
        "l.mlp.up_proj.weight": torch.zeros(2, 3),
        "l.mlp.down_proj.weight": torch.ones(3, 2),
        "visual.b.attn.qkv.weight": torch.ones(6, 2),
    }
    engine = dict(engine_tensors(tensors))
    assert engine["l.self_attn.qkv_proj.bias"].tolist() == [1, 2, 3, 4]
    assert engine["l.mlp.gate_up_proj.weight"].sum(1).tolist() == [3, 3, 0, 0]
    embedding = engine["model.embed_tokens.weight"]
    assert embedding.shape == (128, 2) and embedding[:70].all() and not embedding[70:].any()
    assert set(engine) == {
        "model.embed_tokens.weight",
        "l.self_attn.qkv_proj.bias",
        "l.mlp.gate_up_proj.weight",
        "l.mlp.down_proj.weight",
        "visual.b.attn.qkv_proj.weight",
    }


def test_checksum_is_of_the_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).t()
    expected = hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().tobytes())
    assert checksums([("x.weight", tensor)]) == {"x.weight": expected.hexdigest()[:16]}

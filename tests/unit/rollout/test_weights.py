"""Portions, the bucket's layout, and the engine's tensors."""

import hashlib
from collections.abc import Collection, Sequence

import torch

from megavlm.models.common.mapping import ROWS, expert_down, same
from megavlm.rollout.weights.gather import to_hf
from megavlm.rollout.weights.plan import Plan
from megavlm.rollout.weights.transports.bucket import flatten
from megavlm.rollout.weights.verify import checksums, engine_tensors


def plan(sizes: Sequence[int], changed: Collection[int] = ()) -> Plan:
    """Entries of so many elements, each with the first rank alone."""
    entries = [same(f"t{i}", f"t{i}", (size,), ROWS) for i, size in enumerate(sizes)]
    return Plan(entries, {i: (0,) for i in range(len(sizes))}, frozenset(changed))


def test_portions_are_bounded_by_the_bytes_of_whole_tensors() -> None:
    """A tensor above the bound is alone."""
    runs = list(plan([2, 3, 30, 1, 4]).portions(full=True, itemsize=4, max_bytes=20))
    assert runs == [[0, 1], [2], [3, 4]]
    assert list(plan([9, 1]).portions(full=True, itemsize=4, max_bytes=39)) == [[0], [1]]
    assert list(plan([9, 1]).portions(full=True, itemsize=2, max_bytes=39)) == [[0, 1]]
    assert list(plan([]).portions(full=True, itemsize=4, max_bytes=20)) == []


def test_without_full_only_what_changed_is_sent() -> None:
    some = plan([2, 3, 30, 1], changed=(3, 1))
    assert list(some.portions(full=False, itemsize=4, max_bytes=1000)) == [[1, 3]]
    assert list(plan([2]).portions(full=False, itemsize=4, max_bytes=1000)) == []


def test_a_stack_of_experts_is_never_cut() -> None:
    experts = [expert_down("fc2", "down_proj", (3, 2, 5), expert) for expert in range(3)]
    entries = [same("a", "a", (4,)), *experts, same("b", "b", (4,))]
    whole = Plan(entries, {i: (i % 2,) for i in range(5)}, frozenset())
    assert list(whole.portions(full=True, itemsize=1, max_bytes=8)) == [[0], [1, 2, 3], [4]]
    assert list(whole.portions(full=True, itemsize=1, max_bytes=34)) == [[0, 1, 2, 3], [4]]


def test_a_stack_is_its_experts_in_order() -> None:
    """HF's [E, I, H] from Megatron's [H, I] of each expert."""
    entries = [expert_down("fc2", "down_proj", (3, 2, 5), expert) for expert in range(3)]
    stack = torch.arange(30.0).view(3, 2, 5)
    ((name, tensor),) = to_hf([(e, stack[e.expert].t()) for e in entries])
    assert name == "down_proj" and torch.equal(tensor, stack)


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
        "model.visual.merger.norm.bias": torch.ones(2),
        "model.language_model.e.mlp.experts.gate_up_proj": torch.ones(4, 2, 6),
        "model.language_model.e.mlp.experts.down_proj": torch.ones(4, 3, 2),
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
        "visual.merger.norm.bias",
        "model.e.mlp.experts.w13_weight",
        "model.e.mlp.experts.w2_weight",
    }
    assert engine["model.e.mlp.experts.w13_weight"].shape == (4, 6, 2)
    assert engine["model.e.mlp.experts.w2_weight"].shape == (4, 2, 3)


def test_checksum_is_of_the_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).t()
    expected = hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().tobytes())
    assert checksums([("x.weight", tensor)]) == {"x.weight": expected.hexdigest()[:16]}

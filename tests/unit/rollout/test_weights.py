"""Which ranks give what in which buckets, the flat bucket's layout, and the engine's tensors."""

import hashlib
from collections.abc import Collection, Sequence

import pytest
import torch

from megavlm.models.common.mapping import ROWS, Entry, expert_down, same
from megavlm.parallel.mesh import Layout
from megavlm.rollout.weights.engine import Engine, engine_tensors
from megavlm.rollout.weights.gather import to_hf
from megavlm.rollout.weights.plan import Plan, TrainerRanks, layer_stages
from megavlm.rollout.weights.transports.payload import flatten
from megavlm.rollout.weights.verify import checksums

LAST = "language_model.decoder.final_layernorm.weight"
EMBEDDING = "language_model.embedding.word_embeddings.weight"


def plan(entries: Sequence[Entry], changed: Collection[int] = ()) -> Plan:
    return Plan(entries, TrainerRanks(), frozenset(changed))


def runs(plan: Plan, max_bytes: int, itemsize: int = 4, full: bool = True) -> list[list[int]]:
    buckets = plan.buckets(full=full, itemsize=itemsize, max_bytes=max_bytes)
    return [list(bucket.entries) for bucket in buckets]


def tensors(*sizes: int) -> list[Entry]:
    return [same(f"t{i}", f"t{i}", (size,), ROWS) for i, size in enumerate(sizes)]


def test_buckets_are_bounded_by_the_bytes_of_whole_tensors() -> None:
    """A tensor above the bound is alone."""
    assert runs(plan(tensors(2, 3, 30, 1, 4)), 20) == [[0, 1], [2], [3, 4]]
    assert runs(plan(tensors(9, 1)), 39) == [[0], [1]]
    assert runs(plan(tensors(9, 1)), 39, itemsize=2) == [[0, 1]]
    assert runs(plan(tensors()), 20) == []


def test_what_changes_comes_first_and_alone_where_the_rest_is_known() -> None:
    some = plan(tensors(2, 3, 30, 1), changed=(3, 1))
    assert runs(some, 1000, full=False) == [[1, 3]]
    assert runs(some, 1000) == [[1, 3], [0, 2]]
    assert runs(plan(tensors(2)), 1000, full=False) == []


def test_what_a_server_stores_as_one_is_never_divided() -> None:
    """Experts of a stack, and gate and up of the tower's MLP, though their biases lie between."""
    experts = [expert_down("fc2", "e.experts.down_proj", (3, 2, 5), expert) for expert in range(3)]
    whole = plan([same("a", "a", (4,)), *experts, same("b", "b", (4,))])
    assert runs(whole, 8, itemsize=1) == [[0], [1, 2, 3], [4]]
    assert runs(whole, 34, itemsize=1) == [[0, 1, 2, 3], [4]]
    names = [
        f"visual.blocks.0.mlp.{part}.{kind}"
        for part in ("gate_proj", "up_proj")
        for kind in ("weight", "bias")
    ]
    gated = plan([same(name, name, (4,)) for name in names])
    assert runs(gated, 8, itemsize=1) == [[0, 2], [1, 3]]


def test_each_stage_sends_its_own() -> None:
    names = [f"language_model.decoder.layers.{i}.x" for i in range(4)]
    entries = [same(name, name, (4,)) for name in [*names, "visual.y", LAST, EMBEDDING]]
    trainer = TrainerRanks(Layout(pipeline=2, tensor=2), 8, layer_stages(4, Layout(pipeline=2)))
    staged = Plan(entries, trainer, frozenset(range(7)))
    found = [(b.stage, b.entries) for b in staged.buckets(full=True, itemsize=4, max_bytes=1000)]
    assert found == [(0, (0, 1, 4, 6)), (1, (2, 3, 5))]
    assert staged.givers == ((0,), (0,), (4,), (4,), (0,), (4,), (0,))


@pytest.mark.parametrize(
    ("layout", "ends", "expected"),
    [
        (Layout(pipeline=2), (None, None), "00001111"),
        (Layout(pipeline=4), (1, 1), "01112223"),
        (Layout(pipeline=2), (3, None), "00011111"),
        (Layout(pipeline=2, virtual=2), (None, None), "00110011"),
        (Layout(pipeline=2, virtual=4), (None, None), "01010101"),
        (Layout(), (None, None), "00000000"),
    ],
)
def test_stages_of_layers(
    layout: Layout, ends: tuple[int | None, int | None], expected: str
) -> None:
    assert "".join(map(str, layer_stages(8, layout, *ends))) == expected


def test_givers_of_experts() -> None:
    """Of a stage's ranks the expert tensor axis is the fastest, then the expert axis."""
    layout = Layout(pipeline=2, expert=2, expert_tensor=2)
    trainer = TrainerRanks(layout, 16, (0, 1))
    for expert, ranks in ((0, (8, 9)), (1, (8, 9)), (2, (10, 11)), (3, (10, 11))):
        key = "language_model.decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
        entry = expert_down(key, "x.experts.down_proj", (4, 2, 5), expert)
        assert trainer.givers(entry) == ranks


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
    engine = dict(engine_tensors(tensors, Engine(), 0))
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
    expected = hashlib.sha256(tensor.contiguous().view(torch.int16).numpy()).hexdigest()[:16]
    found = checksums([("x.weight", tensor)], {Engine(2): "cpu"})
    assert found == {Engine(2): [{"x.weight": expected}] * 2}  # no rank cuts such a one

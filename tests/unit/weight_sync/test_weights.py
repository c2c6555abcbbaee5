"""Which ranks give what in which buckets, the flat bucket's layout, and the engine's tensors."""

import hashlib
from collections.abc import Collection, Sequence

import pytest
import torch

from megavlm.models.common.mapping import EXPERT_COLUMNS, ROWS, Entry, same, stacked
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.checksums import Checksums
from megavlm.weight_sync.gather import to_hf
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks, layer_stages
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors, server_tensors
from megavlm.weight_sync.transports.payload import flatten

LAST = "language_model.decoder.final_layernorm.weight"
EMBEDDING = "language_model.embedding.word_embeddings.weight"


def plan(entries: Sequence[Entry], changed: Collection[int] = ()) -> SyncPlan:
    return SyncPlan(entries, TrainerRanks(), frozenset(changed))


def runs(plan: SyncPlan, max_bytes: int, itemsize: int = 4, full: bool = True) -> list[list[int]]:
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


def test_a_stack_of_experts_is_cut_to_buckets() -> None:
    experts = [
        stacked("fc2", "e.experts.down_proj", (3, 2, 5), EXPERT_COLUMNS, expert, transposed=True)
        for expert in range(3)
    ]
    whole = plan([same("a", "a", (4,)), *experts, same("b", "b", (4,))])
    assert runs(whole, 10, itemsize=1) == [[0], [1], [2], [3], [4]]
    assert runs(whole, 24, itemsize=1) == [[0, 1, 2], [3, 4]]


def test_what_a_server_stores_as_one_is_never_divided() -> None:
    """Gate and up of the tower's MLP, though their biases lie between."""
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
    staged = SyncPlan(entries, trainer, frozenset(range(7)))
    found = [(b.stage, b.entries) for b in staged.buckets(full=True, itemsize=4, max_bytes=1000)]
    assert found == [(0, (0, 1, 4, 6)), (1, (2, 3, 5))]
    assert staged.source_ranks == ((0,), (0,), (4,), (4,), (0,), (4,), (0,))


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
        entry = stacked(
            key, "x.experts.down_proj", (4, 2, 5), EXPERT_COLUMNS, expert, transposed=True
        )
        assert trainer.source_ranks(entry) == ranks


def test_a_piece_of_a_stack_is_its_experts_in_order() -> None:
    """HF's [E, I, H] from Megatron's [H, I] of each expert."""
    entries = [
        stacked("fc2", "x.experts.down_proj", (3, 2, 5), EXPERT_COLUMNS, expert, transposed=True)
        for expert in range(3)
    ]
    stack = torch.arange(30.0).view(3, 2, 5)
    ((name, tensor),) = to_hf([(entries[i], stack[i].t()) for i in (1, 2)])
    assert name == "x.experts.down_proj[1:3/3]" and torch.equal(tensor, stack[1:])
    alone = dict(hub_tensors([(name, tensor)]))
    assert alone.keys() == {f"x.experts.{expert}.down_proj.weight" for expert in (1, 2)}
    assert torch.equal(alone["x.experts.2.down_proj.weight"], stack[2].t())


def test_experts_one_by_one_are_gate_and_up_of_the_stack() -> None:
    stack = torch.randn(4, 3, 10)
    alone = dict(hub_tensors([("x.experts.gate_up_proj[2:4/4]", stack[2:])]))
    for expert in (2, 3):
        gate, up = (alone[f"x.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up"))
        assert torch.equal(torch.cat([gate, up]).t(), stack[expert])


@pytest.mark.parametrize(("size", "expert_parallel"), [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_pieces_are_rows_of_what_ranks_store(size: int, expert_parallel: int) -> None:
    """Their checksums together are those of the stack."""
    layout = ServerLayout(size, expert_parallel)
    stacks = {"l.experts.gate_up_proj": (8, 3, 16), "l.experts.down_proj": (8, 8, 3)}
    tensors = {name: torch.randn(shape) for name, shape in stacks.items()}
    found, expected = Checksums(), Checksums()
    expected.add([*tensors.items()], {layout: "cpu"})
    rows: list[dict[str, list[int]]] = [{} for _ in range(size)]
    for first, end in ((0, 3), (3, 5), (5, 8)):
        pieces = {f"{name}[{first}:{end}/8]": x[first:end] for name, x in tensors.items()}
        found.add([*pieces.items()], {layout: "cpu"})
        for rank in range(size):
            whole = dict(server_tensors(tensors, layout, rank))
            for place, tensor in server_tensors(pieces, layout, rank):
                name, low, high = place.replace("[", ":").rstrip("]").split(":")
                assert torch.equal(whole[name][int(low) : int(high)], tensor)
                rows[rank].setdefault(name, []).extend(range(int(low), int(high)))
    count = [*range(8 // expert_parallel)]
    assert all(of_rank == {name: count for name in of_rank} for of_rank in rows)
    assert all(len(of_rank) == 2 for of_rank in rows)
    assert found.result() == expected.result()


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
    engine = dict(server_tensors(tensors, ServerLayout(), 0))
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
    found = Checksums()
    found.add([("x.weight", tensor)], {ServerLayout(2): "cpu"})
    assert found.result() == {
        ServerLayout(2): [{"x.weight": expected}] * 2
    }  # no rank cuts such a one


def test_a_cpu_pads_mlps_and_experts() -> None:
    """To 32 a rank, each half by itself."""
    engine, mlp = ServerLayout(2, on_cpu=True), "model.layers.0.mlp"
    tensors = {
        f"{mlp}.gate_proj.weight": torch.ones(40, 3),
        f"{mlp}.up_proj.weight": torch.ones(40, 3),
        f"{mlp}.down_proj.weight": torch.ones(3, 40),
        f"{mlp}.experts.gate_up_proj": torch.ones(2, 3, 80),
        f"{mlp}.experts.down_proj": torch.ones(2, 40, 3),
    }
    first, second = (dict(server_tensors(tensors, engine, rank)) for rank in range(2))
    assert [len(x[f"{mlp}.gate_up_proj.weight"]) for x in (first, second)] == [64, 64]
    assert second[f"{mlp}.gate_up_proj.weight"].sum(1).tolist() == ([3.0] * 8 + [0.0] * 24) * 2
    assert second[f"{mlp}.down_proj.weight"].sum(0).tolist() == [3.0] * 8 + [0.0] * 24
    w13, w2 = (second[f"{mlp}.experts.{name}"] for name in ("w13_weight", "w2_weight"))
    assert w13.shape == (2, 64, 3) and w13[0].sum(1).tolist() == ([3.0] * 8 + [0.0] * 24) * 2
    assert w2.shape == (2, 3, 32) and w2[0].sum(0).tolist() == [3.0] * 8 + [0.0] * 24


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_all_ranks_make_the_whole(size: int) -> None:
    """Two key-value heads, which four ranks share; experts by twos on four ranks."""
    engine = ServerLayout(size, 2 if size == 4 else 1, num_kv_heads=2)
    attention = "model.language_model.layers.0.self_attn"
    rows = {"q_proj": 8, "k_proj": 2, "v_proj": 2}
    tensors = {
        f"{attention}.{part}.weight": torch.randn(count * 4, 3) for part, count in rows.items()
    }
    stack = torch.randn(4, 3, 16)
    tensors |= {
        f"{attention}.o_proj.weight": torch.randn(3, 32),
        "lm_head.weight": torch.randn(130, 3),
        "model.layers.0.mlp.experts.gate_up_proj": stack,
        "model.visual.blocks.0.attn.qkv.bias": torch.arange(24.0),
        "visual.blocks.0.mlp.gate_proj.bias": torch.ones(20),
        "visual.blocks.0.mlp.up_proj.bias": torch.full((20,), 2.0),
        "visual.blocks.0.mlp.down_proj.weight": torch.ones(3, 20),
        "visual.merger.mlp.2.bias": torch.ones(3),
    }
    ranks = [dict(server_tensors(tensors, engine, rank)) for rank in range(size)]
    held = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    queries = [x[: 32 // size] for x in held["model.layers.0.self_attn.qkv_proj.weight"]]
    assert torch.equal(torch.cat(queries), tensors[f"{attention}.q_proj.weight"])
    keys = [x[32 // size :].chunk(2)[0] for x in held["model.layers.0.self_attn.qkv_proj.weight"]]
    shared = max(1, size // 2)
    assert torch.equal(torch.cat(keys[::shared]), tensors[f"{attention}.k_proj.weight"])
    assert all(torch.equal(keys[i], keys[i // shared * shared]) for i in range(size))
    o = held["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(torch.cat(o, 1), tensors[f"{attention}.o_proj.weight"])
    head = torch.cat(held["lm_head.weight"])
    assert len(head) == 192
    assert torch.equal(head[:130], tensors["lm_head.weight"]) and not head[130:].any()
    qkv = torch.stack([x.view(3, -1) for x in held["visual.blocks.0.attn.qkv_proj.bias"]], 1)
    assert torch.equal(qkv.flatten(), tensors["model.visual.blocks.0.attn.qkv.bias"])
    gate_up = torch.stack(
        [x.view(2, -1) for x in held["visual.blocks.0.mlp.gate_up_proj.bias"]], 1
    ).view(2, -1)
    assert gate_up.tolist() == [[1.0] * 20 + [0.0] * 4, [2.0] * 20 + [0.0] * 4]
    down = torch.cat(held["visual.blocks.0.mlp.down_proj.weight"], 1)
    assert down.shape == (3, 24) and not down[:, 20:].any()
    assert all(len(x) == 3 for x in held["visual.merger.mlp.2.bias"])
    experts = held["model.layers.0.mlp.experts.w13_weight"]
    if size == 4:  # two pairs of ranks: experts 0 and 1, then 2 and 3
        experts = [torch.cat(experts[:2], 1), torch.cat(experts[2:], 1)]
        assert torch.equal(torch.cat(experts)[:, :4], stack.transpose(1, 2)[:, :4])
    elif size == 1:
        assert torch.equal(experts[0], stack.transpose(1, 2))
    assert sum(x.numel() for x in experts) == stack.numel()

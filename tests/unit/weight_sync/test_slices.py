"""Slices that each rank of a server is sent: by the plan no byte too many, for every family, layout
and server; and in real groups from all stages at once, with ranks that fail.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.families import FAMILIES
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.mapping import Entry, fused_qkv, gated, same
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.gather import to_hf
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.sglang_layout import ServerLayout, server_tensors
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import GlooEngine, count_groups, count_stores
from tests.fakes.receivers import FixedReceivers, push
from tests.support.fork import launch
from tests.support.timeouts import scaled


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None].expand(-1, 3)


@pytest.mark.parametrize(
    ("rank", "attention", "mlp"),
    [
        (0, [0, 1, 100, 200], [0, 1, 100, 101]),
        (1, [2, 3, 100, 200], [2, 3, 102, 103]),
        (2, [4, 5, 101, 201], [4, 5, 104, 105]),
        (3, [6, 7, 101, 201], [6, 7, 106, 107]),
    ],
)
def test_rows_that_a_rank_stores(rank: int, attention: list[int], mlp: list[int]) -> None:
    """Of eight query heads and two key-value heads, which neighbouring ranks share; of a gated MLP
    a part of the gate above the same part of the other.
    """
    layer = "model.layers.0"
    tensors = {
        f"{layer}.self_attn.q_proj.weight": rows(*range(8)),
        f"{layer}.self_attn.k_proj.weight": rows(100, 101),
        f"{layer}.self_attn.v_proj.weight": rows(200, 201),
        f"{layer}.mlp.gate_proj.weight": rows(*range(8)),
        f"{layer}.mlp.up_proj.weight": rows(*range(100, 108)),
    }
    stored = dict(server_tensors(tensors, ServerLayout(4, num_kv_heads=2), rank))
    assert [tensor[:, 0].tolist() for tensor in stored.values()] == [attention, mlp]


ATTENTION = "model.layers.{}.self_attn"
FIRST, LAST = "language_model.embedding.w", "language_model.output_layer.w"


def entries_of(layers: int) -> list[Entry]:
    entries = [same(FIRST, "model.embed_tokens.weight", (100, 4))]  # padded to 128 rows
    for layer in range(layers):
        name, mlp = f"language_model.decoder.layers.{layer}", f"model.layers.{layer}.mlp"
        hf = [f"{ATTENTION.format(layer)}.{x}_proj.weight" for x in "qkv"]
        entries += [
            fused_qkv(f"{name}.qkv", hf, ((16, 4), (8, 4), (8, 4)), 2),
            same(f"{name}.o", f"{ATTENTION.format(layer)}.o_proj.weight", (4, 16)),
            gated(f"{name}.fc1", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", (64, 4)),
            same(f"{name}.norm", f"model.layers.{layer}.input_layernorm.weight", (4,)),
        ]
    return [*entries, same(LAST, "lm_head.weight", (128, 4))]


LAYERS, HEADS = 4, 2
ENTRIES = entries_of(LAYERS)
SERVER = ServerLayout(2, num_kv_heads=HEADS, on_cpu=True)


def full(entry: Entry) -> Tensor:
    generator = torch.Generator().manual_seed(ENTRIES.index(entry))
    return torch.randint(100, entry.megatron_shape, generator=generator).float()


def grown(tensor: Tensor, pushes: int, step: int) -> Tensor:
    tensor.view(-1)[::step] += pushes
    return tensor


def stored(pushes: int, step: int = 1) -> list[dict[str, Tensor]]:
    """What each rank of a server must hold: every number, or each `step`-th of the trainer's, grows
    by one with each push.
    """
    tensors = dict(
        x for entry in ENTRIES for x in to_hf([(entry, grown(full(entry), pushes, step))])
    )
    return [dict(server_tensors(tensors, SERVER, rank)) for rank in range(2)]


SHAPES = [{name: tensor.shape for name, tensor in rank.items()} for rank in stored(0)]


class Model(torch.nn.Module):
    """What this rank's stage holds."""

    def __init__(self, plan: SyncPlan) -> None:
        super().__init__()
        self.held = {}
        for index, entry in enumerate(ENTRIES):
            if plan.stages[index] == dist.get_rank():
                self.held[entry.megatron] = torch.nn.Parameter(full(entry))
                self.register_parameter(str(index), self.held[entry.megatron])

    def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        return {k: ShardedTensor.from_rank_offsets(k, x) for k, x in self.held.items()}


def make_plan(stages: int, per_node: int | None = None) -> SyncPlan:
    of_layers = tuple(layer * stages // LAYERS for layer in range(LAYERS))
    trainer = TrainerRanks(Layout(pipeline=stages), stages, of_layers, per_node)
    return SyncPlan(ENTRIES, trainer, frozenset(range(len(ENTRIES))))


def pushes(
    urls: Sequence[str],
    versions: Sequence[int],
    kind: str,
    bucket: int = 2048,
    delta_step: int | None = None,
    per_node: int | None = None,
) -> dict[str, Any]:
    """On each of the stages: a rank. delta_step: Send changes, of each `delta_step`-th number."""
    plan = make_plan(dist.get_world_size(), per_node)
    model = Model(plan)
    receivers = FixedReceivers([Receiver(url, 2, "cpu", True) for url in urls])
    way = DistributedTransport if kind == "distributed" else TensorTransport
    sync = WeightSync(
        plan,
        [model],  # type: ignore[list-item]
        way(timeout=scaled(30)),
        SyncSettings(
            torch.float32,
            HEADS,
            timeout=scaled(30),
            bucket_bytes=bucket,
            delta=delta_step is not None,
        ),
        receivers=receivers if dist.get_rank() == 0 else None,
    )
    reports, errors = [], []
    for version in versions:
        with torch.no_grad():
            for parameter in model.parameters():
                grown(parameter.data, 1, delta_step or 1)
        try:
            reports.append(push(sync, version))
        except WeightSyncError as error:
            errors.append(str(error))
    sync.close()
    return {"reports": reports, "errors": errors}


def check_held(engine: GlooEngine, version: str, pushes: int, step: int = 1) -> None:
    found, weights = engine.state()
    wanted = {
        f"{rank} {name}": x
        for rank, held in enumerate(stored(pushes, step))
        for name, x in held.items()
    }
    assert found == version and weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
@pytest.mark.parametrize("stages", [1, 2])
def test_servers_get_three_requests_a_push(kind: str, stages: int) -> None:
    """And one more when they are new. All ranks of all stages send in many buckets. Padding, which
    is not sent, is zero even on a server whose memory has something else in it.
    """
    with GlooEngine(SHAPES, fill=math.nan) as one, GlooEngine(SHAPES) as other:
        results = launch(stages, pushes, [one.url, other.url], (4, 5), kind)
        for engine in (one, other):
            check_held(engine, "5", 2)
            a_push = ["/pause_generation", "/update_weights_from_tensor", "/continue_generation"]
            assert engine.paths() == ["/server_info", *a_push, *a_push]
        for result in results:
            (_, report) = result["reports"]
            assert report.bytes == 2 * 4 * (sum_of_sizes(stored(0)) - 28 * 4)
            assert report.checked == 2 * 2 * len(SHAPES[0]) and report.tensors == 7 * LAYERS + 2


def sum_of_sizes(ranks: Sequence[dict[str, Tensor]]) -> int:
    return sum(tensor.numel() for rank in ranks for tensor in rank.values())


def counted_pushes(*arguments: Any) -> tuple[int, int]:
    opened, joined = count_stores(), count_groups()
    assert not pushes(*arguments)["errors"]
    return len(opened), len(joined)


def test_after_the_first_push_no_connection_is_opened() -> None:
    """For each one torch looks up names of addresses, and a lost answer takes five seconds."""
    found = []
    for versions in ((4,), (4, 5, 6)):
        with GlooEngine(SHAPES) as one, GlooEngine(SHAPES) as other:
            stages = launch(2, counted_pushes, [one.url, other.url], versions, "distributed")
            engines = [(engine.connections(), engine.groups()) for engine in (one, other)]
            found.append([*stages, *engines])
    # Each rank polls on one connection and waits on another.
    assert found == [[(2, 1), (2, 1), (4, 2), (4, 2)]] * 2


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
@pytest.mark.parametrize(
    "dies_at", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_server_of_two_ranks_dies_while_it_receives(kind: str, dies_at: int) -> None:
    """Both stages notice; the other server is sent everything again."""
    with GlooEngine(SHAPES) as lives, GlooEngine(SHAPES, dies_at=dies_at) as dies:
        results = launch(2, pushes, [dies.url, lives.url], (4,), kind)
        assert [[x.servers for x in result["reports"]] for result in results] == [[1], [1]], results
        check_held(lives, "4", 1)


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
def test_a_rank_that_cannot_load_says_why(kind: str) -> None:
    other = [SHAPES[0], SHAPES[1] | {"lm_head.weight": torch.Size((5, 4))}]
    with GlooEngine(SHAPES) as good, GlooEngine(other) as bad:
        results = launch(2, pushes, [good.url], (4,), kind)
        assert not results[0]["errors"]
        results = launch(2, pushes, [bad.url], (5, 6), kind)
        for result in results:
            for error in result["errors"]:
                assert f"{bad.url} did not load weights on its rank 1: " in error
                assert (
                    "lm_head.weight is float32 [5, 4] in the server, but float32 [64, 4]" in error
                )
            assert len(result["errors"]) == 2, "and it lives: it refuses the next push too"


def test_heads_that_ranks_do_not_divide_get_heads_of_zeros() -> None:
    """Of a tower with three heads of two rows, each of four ranks has one head; the last has
    zeros.
    """
    block = "visual.blocks.0.attn"
    proj = torch.arange(1, 7).expand(6, 6)
    tensors = {f"{block}.qkv.weight": rows(*range(1, 19)), f"{block}.proj.weight": proj}
    found = []
    for rank in range(4):
        stored = [*server_tensors(tensors, ServerLayout(4, vision_head_dim=2), rank)]
        found.append((stored[0][1][:, 0].tolist(), stored[1][1][0].tolist()))
    assert found == [
        ([1, 2, 7, 8, 13, 14], [1, 2]),
        ([3, 4, 9, 10, 15, 16], [3, 4]),
        ([5, 6, 11, 12, 17, 18], [5, 6]),
        ([0] * 6, [0, 0]),
    ]


def test_a_tower_with_separate_projections_has_the_servers_names_and_heads() -> None:
    """The 25 heads of InternViT-6B on two ranks: 13 each, and a norm over all 26 on both."""
    names = FAMILIES["internvl"].server_names()
    layout = ServerLayout(2, vision_head_dim=2, names=names)
    block = "vision_tower.encoder.layer.3"
    tensors = {f"{block}.attention.{x}_proj.weight": rows(*range(1, 51)) for x in "qkv"}
    tensors |= {f"{block}.attention.q_norm.weight": torch.ones(50)}
    tensors |= {f"{block}.attention.projection_layer.weight": torch.ones(50, 50)}
    tensors |= {f"{block}.mlp.fc1.bias": torch.ones(8), f"{block}.lambda_1": torch.ones(50)}
    tensors |= {"multi_modal_projector.linear_2.weight": torch.ones(6, 6)}
    tensors |= {"language_model.model.norm.weight": torch.ones(6)}
    found = {name: tuple(x.shape) for name, x in server_tensors(tensors, layout, 1)}
    attention = "vision_model.encoder.layers.3.attn.attn"
    assert found == {
        f"{attention}.qkv_proj.weight": (78, 3),
        f"{attention}.q_norm.weight": (52,),
        f"{attention}.proj.weight": (50, 26),
        "vision_model.encoder.layers.3.mlp.fc1.bias": (4,),
        "vision_model.encoder.layers.3.ls1": (50,),
        "mlp1.3.weight": (6, 6),
        "language_model.model.norm.weight": (6,),
    }
    fused = dict(server_tensors(tensors, layout, 1))[f"{attention}.qkv_proj.weight"][:, 0]
    assert fused.view(3, 26).tolist() == [[*range(27, 51), 0, 0]] * 3

"""Slices that each rank of a server is sent: by the plan no byte too many, for every family, layout
and server; and in real groups from all stages at once, with ranks that fail.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.families import family
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry, fused_qkv, gated, same
from megavlm.parallel.mesh import Layout
from megavlm.run.capacity.weight_updates import stored_bytes
from megavlm.weight_sync.gather import to_hf
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks, numel
from megavlm.weight_sync.server_parameters import rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, parameter_name, server_tensors
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import GlooEngine, count_stores
from tests.fakes.receivers import FixedReceivers, push
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.releases import released_config
from tests.support.timeouts import scaled

BUCKET = 2**28
DENSE = (Layout(), Layout(tensor=8, pipeline=2), Layout(pipeline=2, virtual=2, context=2))
EXPERTS = (Layout(tensor=4, pipeline=4, expert=8), Layout(expert=8, expert_tensor=4))
RELEASES = {
    "Qwen2-VL-7B": DENSE,
    "Qwen2.5-VL-72B": DENSE,
    "Qwen3-VL-8B": DENSE,
    "Qwen3-VL-30B-A3B": EXPERTS[:1],
    "Qwen3-VL-235B-A22B": (*DENSE, *EXPERTS),
}


def bucket_tensors(plan: SyncPlan, indices: Sequence[int]) -> list[tuple[str, Tensor]]:
    """What `gather` brings together, without memory."""
    tensors: list[tuple[str, Tensor]] = []
    for _, group in groupby(indices, key=lambda index: plan.entries[index].hf):
        entries = [plan.entries[index] for index in group]
        shape = entries[0].megatron_shape
        tensors += to_hf(
            [(x, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for x in entries]
        )
    return tensors


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


@pytest.mark.parametrize("release", [*[*RELEASES][:-1], *slow([*RELEASES][-1])])
def test_a_rank_is_sent_little_more_than_it_stores(release: str, tmp_path: Path) -> None:
    """Of four layers, which are as all others."""
    config = released_config(release, tmp_path, num_hidden_layers=4)
    text = config.text_config
    entries = family(config.model_type).mapping(config)
    heads, options = text.num_key_value_heads, ModelOptions()
    names = frozenset(parameter_name(name) for entry in entries for name in entry.hf)
    for layout in RELEASES[release]:
        trainer = TrainerRanks.of(config, layout, 512, options)
        plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
        buckets = [*plan.buckets(full=False, itemsize=2, max_bytes=BUCKET)]
        tensors = [bucket_tensors(plan, bucket.entries) for bucket in buckets]
        for bucket in buckets:
            size = 2 * sum(numel(entries[index]) for index in bucket.entries)
            assert size <= BUCKET or len({entries[index].hf for index in bucket.entries}) == 1
            assert size <= BUCKET or entries[bucket.entries[0]].expert is None
        with_experts = any(entry.expert is not None for entry in entries)
        for size in (1, 2, 4, 8):
            for expert_parallel in {1, size} if with_experts else {1}:
                servers = ServerLayout(size, expert_parallel, heads)
                changed = [entries[index] for index in plan.changed]
                stored = stored_bytes(changed, servers, 2)
                received = Counter[int]()
                for some in tensors:
                    for rank, flat in enumerate(rank_slices(some, servers, names)):
                        received[rank] += flat.tensor.nbytes
                        assert not flat.whole
                for rank, num_bytes in enumerate(stored):
                    assert num_bytes <= received[rank] <= 1.1 * num_bytes, (layout, servers, rank)


ATTENTION = "model.layers.{}.self_attn"
FIRST, LAST = "language_model.embedding.w", "language_model.output_layer.w"


def entries_of(layers: int) -> list[Entry]:
    entries = [same(FIRST, "model.embed_tokens.weight", (128, 4))]
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


def stored(pushes: int) -> list[dict[str, Tensor]]:
    """What each rank of a server must hold: every number grows by one with each push."""
    tensors = dict(x for entry in ENTRIES for x in to_hf([(entry, full(entry) + pushes)]))
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


def pushes(urls: Sequence[str], versions: Sequence[int], kind: str) -> dict[str, Any]:
    """On each of the stages: a rank."""
    size = dist.get_world_size()
    stages = tuple(layer * size // LAYERS for layer in range(LAYERS))
    trainer = TrainerRanks(Layout(pipeline=size), size, stages)
    plan = SyncPlan(ENTRIES, trainer, frozenset(range(len(ENTRIES))))
    model = Model(plan)
    node = 0 if kind == "local" else None
    receivers = FixedReceivers([Receiver(url, 2, "cpu", True, node=node) for url in urls])
    way = (
        DistributedTransport("127.0.0.1", timeout=scaled(30))
        if kind == "distributed"
        else TensorTransport()
    )
    sync = WeightSync(
        plan,
        [model],  # type: ignore[list-item]
        way,
        SyncSettings(torch.float32, HEADS, timeout=scaled(30), bucket_bytes=2048),
        receivers=receivers if dist.get_rank() == 0 else None,
    )
    reports, errors = [], []
    for version in versions:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        try:
            reports.append(push(sync, version))
        except WeightSyncError as error:
            errors.append(str(error))
    sync.close()
    per_stage = Counter(b.stage for b in plan.buckets(full=True, itemsize=4, max_bytes=2048))
    return {"reports": reports, "errors": errors, "buckets": [*per_stage.values()]}


def check_held(engine: GlooEngine, version: str, pushes: int) -> None:
    found, weights = engine.state()
    wanted = {
        f"{rank} {name}": x for rank, held in enumerate(stored(pushes)) for name, x in held.items()
    }
    assert found == version and weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("kind", "stages"), [("distributed", 2), ("distributed", 1), ("tensor", 1), ("local", 1)]
)
def test_ranks_receive_their_slices_in_one_request_a_round(kind: str, stages: int) -> None:
    with GlooEngine(shapes=SHAPES) as one, GlooEngine(shapes=SHAPES) as other:
        results = launch(stages, pushes, [one.url, other.url], (4, 5), kind)
        for engine in (one, other):
            check_held(engine, "5", 2)
            updates = engine.paths().count("/update_weights_from_tensor")
            assert updates == 2 * max(results[0]["buckets"]), "all stages' buckets in one"
            assert engine.paths().count("/weights_checker") == 3, "names once, checksums twice"
        assert len(results[0]["buckets"]) == stages and max(results[0]["buckets"]) > 3
        for result in results:
            (_, report) = result["reports"]
            assert report.bytes == 2 * sum(
                4 * x.numel() for rank in stored(0) for x in rank.values()
            )


def counted_pushes(*arguments: Any) -> int:
    opened = count_stores()
    assert not pushes(*arguments)["errors"]
    return len(opened)


def test_after_the_first_push_no_connection_is_opened() -> None:
    """For each one torch looks up names of addresses, and a lost answer takes five seconds."""
    found = []
    for versions in ((4,), (4, 5, 6)):
        with GlooEngine(shapes=SHAPES) as one, GlooEngine(shapes=SHAPES) as other:
            stages = launch(2, counted_pushes, [one.url, other.url], versions, "distributed")
            found.append([*stages, one.connections(), other.connections()])
    assert found == [[2, 2, 4, 4]] * 2, "each rank listens on one and joins groups on another"


@pytest.mark.parametrize("dies_at", [1, 3])
def test_a_server_of_two_ranks_dies_while_it_receives(dies_at: int) -> None:
    """Both stages notice; the other server is sent everything again."""
    with GlooEngine(shapes=SHAPES) as lives, GlooEngine(dies_at, SHAPES) as dies:
        results = launch(2, pushes, [dies.url, lives.url], (4,), "distributed")
        assert [[x.servers for x in result["reports"]] for result in results] == [[1], [1]], results
        check_held(lives, "4", 1)


def test_a_rank_that_cannot_load_says_why() -> None:
    other = [SHAPES[0], SHAPES[1] | {"lm_head.weight": torch.Size((5, 4))}]
    with GlooEngine(shapes=SHAPES) as good, GlooEngine(shapes=other) as bad:
        results = launch(2, pushes, [good.url], (4,), "distributed")
        assert not results[0]["errors"]
        results = launch(2, pushes, [bad.url], (5, 6), "distributed")
        for result in results:
            for error in result["errors"]:
                assert f"{bad.url} did not load weights on its rank 1: AssertionError" in error
                assert "lm_head.weight is [5, 4] here, not [64, 4]" in error
            assert len(result["errors"]) == 2, "and it lives: it refuses the next push too"
        assert bad.state()[0] == "3"

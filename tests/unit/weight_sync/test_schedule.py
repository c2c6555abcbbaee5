"""Schedules of weight updates: every rank of a server gets exactly what it stores, from ranks that
hold it, and all of them send alike.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megavlm.families import family
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.parallel.mesh import Layout
from megavlm.planner.weight_updates import stored_bytes
from megavlm.weight_sync.gather import to_hf
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.schedule import Server, SyncSchedule, cut, make_schedule
from megavlm.weight_sync.sglang_layout import (
    ServerLayout,
    hub_tensors,
    is_expert,
    linear_rows,
    parameter_name,
    server_tensors,
)
from megavlm.weight_sync.trainable import trained_entries
from tests.support.families import small_config
from tests.support.levels import slow
from tests.support.releases import released_config

SIZES = {"num_layers": 4, "num_kv_heads": 2}
LAYOUTS = {
    "one rank": (Layout(), 1),
    "TP2xPP2xDP2": (Layout(tensor=2, pipeline=2), 8),
    "CP2xDP2": (Layout(context=2), 4),
    "EP2xPP2": (Layout(pipeline=2, expert=2), 8),
    "TP2, experts TP2": (Layout(tensor=2, expert_tensor=2, expert=2), 8),
}


def tiny_plan(model_type: str, layout: Layout, world: int, per_node: int | None = None) -> SyncPlan:
    config = small_config(model_type, **SIZES)
    entries = family(model_type).mapping(config)
    options = ModelOptions(freeze_tower=False, freeze_merger=False)
    trainer = TrainerRanks.of(config, layout, world, options, per_node)
    return SyncPlan(entries, trainer, trained_entries(entries, options, None))


def full(plan: SyncPlan, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, 2**20, plan.entries[index].megatron_shape, generator=generator).float()


def stored(plan: SyncPlan, layout: ServerLayout, rank: int) -> dict[str, Tensor]:
    """What a rank of a server must hold."""
    stacks: dict[object, list[int]] = defaultdict(list)
    for index, entry in enumerate(plan.entries):
        stacks[parameter_name(entry.hf[0])].append(index)
    held: dict[str, Tensor] = {}
    for indices in stacks.values():
        parts = [(plan.entries[i], full(plan, i)) for i in indices]
        if parts[0][0].expert is None:
            tensors = dict(x for part in parts for x in to_hf([part]))
        else:
            tensors = dict(to_hf(parts))
        for name, tensor in server_tensors(tensors, layout, rank):
            held[name.partition("[")[0]] = tensor
        if layout.whole_experts and plan.entries[indices[0]].expert is not None:
            held = {name: x for name, x in held.items() if not is_expert(name)}
            held |= dict(hub_tensors([*tensors.items()]))
    return held


def received(plan: SyncPlan, schedule: SyncSchedule, number: int) -> dict[str, Tensor]:
    """What a target holds after an update."""
    sizes = {
        "tensor": plan.trainer.layout.tensor,
        "expert_tensor": plan.trainer.layout.expert_tensor,
    }
    held: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for stream in schedule.streams:
        if stream.target != number:
            continue
        for bucket in stream.buckets:
            for piece in bucket:
                entry: Entry = plan.entries[piece.entry]
                shards = [
                    shard
                    for shard, ranks in enumerate(plan.holders[piece.entry])
                    if stream.holder in ranks
                ]
                (shard,) = shards
                size = 1 if entry.shard.dim is None else sizes[entry.shard.axis]
                mine = shard_tensor(entry, full(plan, piece.entry), shard, size)
                parameter = held.setdefault(piece.name, torch.zeros(piece.shape))
                count = written.setdefault(piece.name, torch.zeros(piece.shape))
                for to, add in ((parameter, mine), (count, None)):
                    part = to if piece.row is None else to[piece.row]
                    part = part.narrow(piece.dim, piece.start, piece.length)
                    if add is None:
                        part += 1
                    else:
                        part += add.narrow(piece.dim, piece.source, piece.length).view(part.shape)
    assert all(count.max() == 1 for count in written.values()), "every byte once"
    return held


def servers_of(model_type: str) -> list[ServerLayout]:
    config = small_config(model_type, **SIZES)
    text = config.text_config
    own = (text.num_key_value_heads, bool(config.tie_word_embeddings), linear_rows(text))
    layouts = [ServerLayout(size, 1, *own) for size in (1, 2, 4)]
    layouts.append(ServerLayout(2, 1, *own, on_cpu=True))
    if "moe" in model_type:
        layouts += [ServerLayout(2, 2, *own), ServerLayout(4, 2, *own)]
        layouts.append(ServerLayout(2, 2, *own, whole_experts=True))
    return layouts


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_5_vl", "qwen3_vl_moe", *slow("qwen3_5_moe")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_receives_what_it_stores(model_type: str, layout: str) -> None:
    mesh, world = LAYOUTS[layout]
    if mesh.expert * mesh.expert_tensor > 1 and "moe" not in model_type:
        mesh = replace(mesh, expert=1, expert_tensor=1)
    plan = tiny_plan(model_type, mesh, world, per_node=max(1, world // 2))
    for kind in servers_of(model_type):
        servers = [Server("far", kind, True), Server("near", kind, True, 0)]
        schedule = make_schedule(plan, servers, torch.float32, 2**16)
        for number, target in enumerate(schedule.targets):
            want = stored(plan, kind, target.rank)
            if kind.whole_experts:  # those of its own experts
                want = {k: v for k, v in want.items() if ".experts." not in k}
            held = received(plan, schedule, number)
            if kind.whole_experts:
                everything = stored(plan, kind, target.rank)
                experts = {k: v for k, v in held.items() if ".experts." in k}
                assert experts and all(torch.equal(everything[k], v) for k, v in experts.items())
                held = {k: v for k, v in held.items() if k not in experts}
            assert held.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(held[name], tensor), (name, kind, target.rank)


SHARES = [
    ("Qwen2.5-VL-7B", Layout(tensor=2, pipeline=2), 16, ModelOptions(first_stage_layers=2), 2),
    ("Qwen2.5-VL-72B", Layout(tensor=8, pipeline=4, context=2), 128, ModelOptions(), 8),
    ("Qwen3-VL-30B-A3B", Layout(expert=8), 16, ModelOptions(), 2),
    ("Qwen3-VL-30B-A3B", Layout(tensor=2, expert=4, expert_tensor=2), 32, ModelOptions(), 4),
]


@pytest.mark.parametrize("release, layout, world, options, size", SHARES)
def test_all_holders_send_alike(
    release: str, layout: Layout, world: int, options: ModelOptions, size: int, tmp_path: Path
) -> None:
    """Of each stage, whose ranks hold different shards, and in every round; and each rank of a
    server receives what it stores of what changed, without padding.
    """
    config = released_config(release, tmp_path, num_hidden_layers=4 if "A3B" in release else 8)
    entries = family(config.model_type).mapping(config)
    trainer = TrainerRanks.of(config, layout, world, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    kind = ServerLayout(size, 1, config.text_config.num_key_value_heads)
    servers = [Server(str(number), kind, False) for number in range(3)]
    schedule = make_schedule(plan, servers, torch.bfloat16, 2**28)
    sent, got = Counter[int](), Counter[int]()
    for stream in schedule.streams:
        sent[stream.sender] += stream.nbytes
        got[stream.target] += stream.nbytes
        assert stream.room <= 2**28 and len(stream.buckets) == schedule.rounds
    for stage in range(layout.pipeline):
        ranks = range(trainer.first_of(stage), trainer.first_of(stage) + trainer.per_stage)
        share = sum(sent[rank] for rank in ranks) / len(ranks)
        assert all(sent[rank] <= 1.1 * share for rank in ranks)
    changed = [entries[index] for index in plan.changed]
    stored = stored_bytes(changed, kind, 2)
    for number, target in enumerate(schedule.targets):
        assert 0.99 * stored[target.rank] <= got[number] <= stored[target.rank]


def test_servers_on_a_node_are_fed_from_it() -> None:
    """Their node's ranks send what they hold; the rest comes once to it, from ranks elsewhere, and
    all its servers read the same memory.
    """
    plan = tiny_plan("qwen2_5_vl", Layout(pipeline=2), 4, per_node=2)  # a stage a node
    kind = ServerLayout(2, 1, 2)
    servers = [Server(f"{node}{number}", kind, True, node) for node in (0, 1) for number in (0, 1)]
    schedule = make_schedule(plan, servers, torch.float32, 2**30)
    stored = sum(stored_bytes(plan.entries, kind, 4))
    crossing = Counter[int]()
    for stream in schedule.streams:
        target = schedule.targets[stream.target]
        assert plan.trainer.node(stream.sender) == target.node and len(target.urls) == 2
        if plan.trainer.node(stream.holder) != target.node:
            crossing[target.node] += stream.nbytes
    read = sum(stream.nbytes for stream in schedule.streams)
    assert crossing.keys() == {0, 1} and sum(crossing.values()) <= stored
    assert read <= 2 * stored, "once a node, whatever the number of its servers"


def test_pieces_are_cut_between_rows() -> None:
    plan = tiny_plan("qwen2_5_vl", Layout(), 1)
    schedule = make_schedule(plan, [Server("", ServerLayout(), True)], torch.float32, 2**30)
    (stream,) = schedule.streams
    (bucket,) = stream.buckets
    parts = cut(bucket, 7)
    sizes = [sum(piece.nbytes for piece in part) for part in parts]
    widest = max(piece.unit for piece in bucket)
    assert len(parts) == 7 and sum(sizes) == stream.nbytes
    assert max(sizes) - min(sizes) <= 2 * widest

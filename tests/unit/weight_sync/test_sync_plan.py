"""Plans of syncs on clusters that do not exist: what 512 ranks send, and what servers need."""

import re
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.config.lora import LoRA
from megavlm.families import family
from megavlm.models.common.config import ModelOptions
from megavlm.models.sizes import rank_parameters
from megavlm.parallel.mesh import Layout
from megavlm.planner.weight_updates import (
    received_bytes,
    stored_bytes,
    tensor_rows,
    weight_update_table,
)
from megavlm.weight_sync.lora import adapter_entries
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks, numel
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.trainable import trained_entries
from tests.support.levels import slow
from tests.support.releases import released_config

ATTENTION = (16, ("language.attention",))


def make_plan(
    config: Any, layout: Layout, world_size: int, options: ModelOptions, lora: LoRA | None = None
) -> SyncPlan:
    entries = family(config.model_type).mapping(config)
    trainer = TrainerRanks.of(config, layout, world_size, options)
    targets = None if lora is None else lora.targets
    return SyncPlan(entries, trainer, trained_entries(entries, options, targets))


@pytest.mark.parametrize(
    ("release", "layout", "servers", "billions"),
    [
        ("Qwen2.5-VL-72B", Layout(tensor=8, pipeline=4), ServerLayout(8, 1, 8), 72.7),
        ("Qwen3-VL-235B-A22B", Layout(pipeline=2, expert=64), ServerLayout(8, 8, 4), 235.1),
        *slow(
            (
                "Qwen2.5-VL-72B",
                Layout(tensor=4, pipeline=8, virtual=2, context=4),
                ServerLayout(16, 1, 8),
                0,
            ),
            (
                "Qwen3-VL-235B-A22B",
                Layout(tensor=4, pipeline=2, expert=8),
                ServerLayout(8, 1, 4),
                235.1,
            ),
            ("Qwen3-VL-235B-A22B", Layout(expert=8, expert_tensor=4), ServerLayout(16, 4, 4), 0),
        ),
    ],
)
def test_512_ranks(
    release: str, layout: Layout, servers: ServerLayout, billions: float, tmp_path: Path
) -> None:
    config = released_config(release, tmp_path)
    options = ModelOptions()
    plan = make_plan(config, layout, 512, options)
    for index, source_ranks in enumerate(plan.source_ranks):
        stage = plan.stages[index]
        assert {rank // plan.trainer.per_stage for rank in source_ranks} == {stage}
    assert {plan.trainer.first_of(stage) for stage in range(layout.pipeline)} <= set.union(
        *(set(source_ranks) for source_ranks in plan.source_ranks)
    )
    buckets = [*plan.buckets(full=True, itemsize=2, max_bytes=2**30)]
    sent = [index for bucket in buckets for index in bucket.entries]
    assert sorted(sent) == [*range(len(plan.entries))], "each once"
    if billions:
        changed = sum(numel(plan.entries[index]) for index in plan.changed)
        assert changed / 1e9 == pytest.approx(billions, rel=0.02)

    rows = tensor_rows(plan, servers, itemsize=2, lora=ATTENTION)
    assert rows["tower"].changed == rows["tower"].stored == 0 < rows["tower"].full
    changed = sum(row.changed for row in rows.values())
    stored = stored_bytes([plan.entries[i] for i in plan.changed], servers, 2)
    # No rank stores another's slices but norms, padding and key-value heads that ranks share.
    assert changed <= sum(stored) < 1.05 * changed
    most = sum(row.stored for row in rows.values())
    assert received_bytes("distributed", changed, most) <= 1.1 * max(stored)


@pytest.mark.parametrize(
    ("release", "layout", "options", "lora"),
    [
        ("Qwen2.5-VL-7B", Layout(tensor=2, pipeline=2), ModelOptions(freeze_merger=False), None),
        ("Qwen3-VL-2B", Layout(pipeline=2, virtual=2), ModelOptions(freeze_tower=False), None),
        (
            "Qwen3-VL-8B",
            Layout(tensor=2, pipeline=4),
            ModelOptions(first_stage_layers=1, last_stage_layers=3),
            LoRA(rank=4, alpha=8.0, targets=("vision.merger", "language.mlp")),
        ),
        ("Qwen3-VL-30B-A3B", Layout(pipeline=2, expert=2), ModelOptions(), None),
        (
            "Qwen3-VL-30B-A3B",
            Layout(tensor=2, expert=2, expert_tensor=2, pipeline=2),
            ModelOptions(sequence=True),
            None,
        ),
    ],
)
def test_the_plan_is_what_ranks_hold(
    release: str, layout: Layout, options: ModelOptions, lora: LoRA | None, tmp_path: Path
) -> None:
    """Of a run that is laid out without memory: names, trained or not, whole shapes."""
    experts = {"num_experts": 4} if "A3B" in release else {}
    config = released_config(release, tmp_path, num_hidden_layers=8, **experts)
    world_size = 2 * layout.model_size * layout.expert
    plan = make_plan(config, layout, world_size, options, lora)
    for rank in range(world_size):
        parameters = rank_parameters(config, layout, world_size, rank, options, lora)
        held = {x.name: x for x in parameters if "lora_" not in x.name}
        for index in plan.sent_from(rank):
            entry = plan.entries[index]
            name = entry.megatron.replace(".experts.experts.", f".experts.{entry.expert}.")
            given = held[name]
            assert given.numel * len(plan.source_ranks[index]) == numel(entry), name
            if lora is None:
                assert given.trained == (index in plan.changed), name
    if lora is not None:
        adapted = {f"{x.name.rpartition('.')[0]}.weight" for x in parameters if "lora_A" in x.name}
        assert adapted <= {plan.entries[index].megatron for index in plan.changed}


def test_adapters_as_tensors_of_their_own(tmp_path: Path) -> None:
    config = released_config("Qwen2.5-VL-3B", tmp_path, num_hidden_layers=1)
    entries = family(config.model_type).mapping(config)
    settings = LoRA(rank=4, alpha=8.0)
    found = {
        entry.hf[0]: (entry.hf_shapes[0], entry.shard.dim)
        for entry in adapter_entries(entries, settings, Layout(tensor=2), num_kv_heads=2)
    }
    attention = "base_model.model.model.layers.0.self_attn"
    assert found[f"{attention}.q_proj.lora_A.weight"] == ((4, 2048), None)
    assert found[f"{attention}.k_proj.lora_B.weight"] == ((256, 4), 0)
    assert found[f"{attention}.o_proj.lora_A.weight"] == ((4, 2048), 1)
    assert found[f"{attention}.o_proj.lora_B.weight"] == ((2048, 4), None)
    assert len(found) == 2 * 7
    shared = adapter_entries(entries, settings, Layout(tensor=4), num_kv_heads=2)
    (b,) = (x for x in shared if x.hf[0] == f"{attention}.k_proj.lora_B.weight")
    assert b.shard.dim is None  # more ranks than key-value heads: each holds it whole


def test_adapters_of_experts_are_stacks(tmp_path: Path) -> None:
    """Each expert's is on the rank that holds the expert, and they follow each other."""
    config = released_config("Qwen3-VL-30B-A3B", tmp_path, num_hidden_layers=1)
    entries = family(config.model_type).mapping(config)
    settings = LoRA(rank=4, alpha=8.0, targets=("language.experts",))
    layout = Layout(expert=4, expert_tensor=2)
    table = adapter_entries(entries, settings, layout, num_kv_heads=4)
    plan = SyncPlan(table, TrainerRanks(layout, 8, (0,)), frozenset(range(len(table))))
    experts = "base_model.model.model.language_model.layers.0.mlp.experts"
    shapes = {
        "gate_proj.lora_A": ((128, 4, 2048), None),
        "gate_proj.lora_B": ((128, 768, 4), 0),
        "up_proj.lora_A": ((128, 4, 2048), None),
        "up_proj.lora_B": ((128, 768, 4), 0),
        "down_proj.lora_A": ((128, 4, 768), 1),
        "down_proj.lora_B": ((128, 2048, 4), None),
    }
    assert len(table) == 128 * len(shapes)
    for start, (name, (shape, dim)) in zip(range(0, len(table), 128), shapes.items(), strict=True):
        for expert in range(128):
            entry = table[start + expert]
            assert entry.hf == (f"{experts}.{name}.weight",) and entry.expert == expert
            assert (*entry.hf_shapes, entry.shard.dim) == (shape, dim)
            first = expert // 32 * 2
            ranks = (first,) if dim is None else (first, first + 1)
            assert plan.source_ranks[start + expert] == ranks


def test_the_printed_plan(tmp_path: Path, write_recipe: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    released_config("Qwen2.5-VL-7B", folder)
    recipe = write_recipe(model={"folder": str(folder), "dtype": "bfloat16"})
    text = weight_update_table(load(recipe, ["parallel.tensor=4", "rollout.tensor_parallel=4"]), 8)
    assert "trainer: 8 ranks (tensor 4); servers: 1 x 4 ranks" in text
    assert re.search(r"tower +385 +1\.3 GB +- +- +- +no rank", text)
    assert "tensor       each receives 3.8 GB, 1.00 x the least; sent by all ranks alike" in text
    assert "distributed  each receives 3.8 GB, 1.00 x the least; sent by all ranks alike" in text
    assert "disk         each receives 15.2 GB, 4.00 x the least; sent by rank 0" in text
    with pytest.raises(ValueError, match=r"parallel\.tensor=4 .*does not divide the world size 6"):
        weight_update_table(load(recipe, ["parallel.tensor=4"]), 6)

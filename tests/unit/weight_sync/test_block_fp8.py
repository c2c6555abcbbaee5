"""Weights in block FP8: the numbers and scales that SGLang's own quantiser computes, half the
bytes, and every rank of a server receives what it stores.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.families import family
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import shard_tensor
from megavlm.models.common.tiny import tiny_family
from megavlm.parallel.mesh import Layout
from megavlm.planner.weight_updates import stored_bytes
from megavlm.weight_sync.block_fp8 import SUFFIX, is_quantised, scale_shape, scales, values
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.schedule import Server, SyncSchedule, make_schedule, padded
from megavlm.weight_sync.sglang_layout import ServerLayout, linear_rows
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.packer import Packer, size_of
from tests.parity.table import FAMILIES
from tests.support.families import MODEL_TYPES, small_config
from tests.support.levels import slow
from tests.support.releases import released_config
from tests.support.sglang_fp8 import quantise
from tests.unit.weight_sync.test_schedule import full, stored

SHAPES = [(128, 128), (256, 384), (130, 257), (1, 1), (64, 100), (127, 129), (896, 640)]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit by bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    found, expected = found.contiguous(), expected.contiguous()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("size", [1e-9, 1e-5, 0.02, 1, 448, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_scales_are_sglangs(shape: tuple[int, int], size: float) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(size).bfloat16()
    weight[:, ::7] = 0
    expected = quantise(weight)
    assert_same(values(weight), expected[0])
    assert_same(scales(weight), expected[1])


def test_largest_numbers_just_around_those_of_a_power_of_two() -> None:
    """A block whose largest number is 448 times a power of two, or the next one above or below."""
    largest = torch.tensor(
        [exponent << 7 | mantissa for exponent in range(1, 255, 4) for mantissa in (95, 96, 97)],
        dtype=torch.int16,
    ).view(torch.bfloat16)
    weight = largest.repeat_interleave(128)[None].expand(128, -1)
    expected = quantise(weight)
    assert len(expected[1].unique()) > 60
    assert_same(scales(weight), expected[1])
    assert_same(values(weight), expected[0])


def test_experts_are_quantised_one_by_one_as_sglang_quantises_a_stack() -> None:
    stack = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(2)).bfloat16()
    numbers, factors = quantise(stack)
    assert tuple(factors.shape) == scale_shape(tuple(stack.shape))
    for row in range(3):
        assert_same(values(stack[row]), numbers[row])
        assert_same(scales(stack[row]), factors[row])


def config_of(model_type: str) -> Any:
    """Of a model whose shards are whole blocks along the dims that are cut, not along others."""
    sizes = {"hidden_size": 512, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512}
    options = tiny_family(MODEL_TYPES.get(model_type, model_type)).options
    if "head_dim" in options:
        sizes |= {"hidden_size": 192, "head_dim": 128}
    if "linear_head_dim" in options:
        sizes["linear_head_dim"] = 128
    if "moe" in model_type:
        sizes["moe_ffn_size"] = 512
    return small_config(model_type, **sizes)


def plan_of(config: Any, layout: Layout, world: int) -> SyncPlan:
    options = ModelOptions(freeze_tower=False, freeze_merger=False)
    entries = family(config.model_type).mapping(config)
    trainer = TrainerRanks.of(config, layout, world, options)
    return SyncPlan(entries, trainer, trained_entries(entries, options, None))


def servers_of(config: Any) -> list[ServerLayout]:
    text = config.text_config
    own = (text.num_key_value_heads, bool(config.tie_word_embeddings), linear_rows(text))
    layouts = [ServerLayout(size, 1, *own, fp8=True) for size in (1, 2)]
    layouts.append(ServerLayout(2, 1, *own, on_cpu=True, fp8=True))
    if "moe" in config.model_type or getattr(text, "num_experts", None):
        layouts.append(ServerLayout(2, 2, *own, fp8=True))
    return layouts


def received(plan: SyncPlan, schedule: SyncSchedule, number: int) -> dict[str, Tensor]:
    """What a target holds after its senders have packed their buckets."""
    layout = plan.trainer.layout
    sizes = {"tensor": layout.tensor, "expert_tensor": layout.expert_tensor}
    held: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for index, stream in enumerate(schedule.streams):
        if stream.target != number:
            continue
        shards = {}
        for piece in (piece for bucket in stream.buckets for piece in bucket):
            entry, holders = plan.entries[piece.entry], plan.holders[piece.entry]
            (shard,) = (shard for shard, ranks in enumerate(holders) if stream.holder in ranks)
            size = 1 if entry.shard.dim is None else sizes[entry.shard.axis]
            mine = shard_tensor(entry, full(plan, piece.entry), shard, size)
            shards[piece.entry] = partial(torch.clone, mine)
        packer = Packer(shards, torch.bfloat16)
        for round_, bucket in enumerate(stream.buckets):
            buffer = torch.empty(padded(size_of(bucket)), dtype=torch.uint8)
            packer.pack(index, round_, bucket, buffer)
            packer.next_round()
            start = 0
            for piece in bucket:
                part = buffer[start : start + piece.nbytes].view(piece.dtype)
                start += piece.nbytes
                to = held.setdefault(piece.name, torch.zeros(piece.shape, dtype=piece.dtype))
                count = counts.setdefault(piece.name, torch.zeros(piece.shape))
                place = to if piece.row is None else to[piece.row]
                place = place.narrow(piece.dim, piece.start, piece.length)
                place.copy_(part.view(place.shape))
                count = count if piece.row is None else count[piece.row]
                count.narrow(piece.dim, piece.start, piece.length).add_(1)
    assert all(count.max() == 1 for count in counts.values()), "every byte once"
    return held


TENSOR, EXPERTS = Layout(tensor=2, pipeline=2), Layout(tensor=2, expert=2, expert_tensor=2)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("qwen2_5_vl", TENSOR),
        ("qwen3_5", TENSOR),
        ("qwen3_vl_moe", EXPERTS),
        *slow(
            *((name, TENSOR) for name in FAMILIES if name not in ("qwen2_5_vl", "qwen3_5")),
            ("qwen3_5_moe", EXPERTS),
        ),
    ],
)
def test_a_rank_receives_what_sglang_would_store(model_type: str, layout: Layout) -> None:
    """Its slice of each weight, quantised by SGLang; every other tensor as it is."""
    config = config_of(model_type)
    plan = plan_of(config, layout, 8)
    for kind in servers_of(config):
        schedule = make_schedule(plan, [Server("", kind, True)], torch.bfloat16, 2**19)
        assert schedule.rounds > 1
        for number, target in enumerate(schedule.targets):
            held = received(plan, schedule, number)
            want = stored(plan, kind, target.rank)
            assert held.keys() - want.keys() == {
                name + SUFFIX for name in want if is_quantised(name)
            }
            for name, tensor in want.items():
                if is_quantised(name):
                    numbers, factors = quantise(tensor)
                    assert_same(held[name], numbers)
                    assert_same(held[name + SUFFIX], factors)
                else:
                    assert torch.equal(held[name], tensor.to(held[name].dtype)), name


@pytest.mark.parametrize(
    "release, layout, world, options, sizes",
    [
        ("Qwen2.5-VL-7B", Layout(tensor=2, pipeline=2), 16, ModelOptions(), (2, 1)),
        ("Qwen3-VL-30B-A3B", Layout(expert=8), 16, ModelOptions(), (4, 4)),
    ],
)
def test_an_update_has_half_the_bytes(
    release: str,
    layout: Layout,
    world: int,
    options: ModelOptions,
    sizes: tuple[int, int],
    tmp_path: Path,
) -> None:
    """Of the linear layers, with a scale of four bytes for 16,384 numbers; and all ranks still send
    alike. The planner counts the same bytes.
    """
    config = released_config(release, tmp_path, num_hidden_layers=4)
    entries = family(config.model_type).mapping(config)
    trainer = TrainerRanks.of(config, layout, world, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    sent = {}
    for fp8 in (False, True):
        kind = ServerLayout(*sizes, config.text_config.num_key_value_heads, fp8=fp8)
        schedule = make_schedule(plan, [Server("", kind, False)], torch.bfloat16, 2**28)
        of_layers = [
            piece.nbytes
            for stream in schedule.streams
            for bucket in stream.buckets
            for piece in bucket
            if is_quantised(piece.name.removesuffix(SUFFIX))
        ]
        sent[fp8] = sum(of_layers)
        by_rank = Counter[int]()
        for stream in schedule.streams:
            by_rank[stream.sender] += stream.nbytes
            assert stream.room <= 2**28
        for stage in range(layout.pipeline):
            first = trainer.first_of(stage)
            loads = [by_rank[first + rank] for rank in range(trainer.per_stage)]
            assert max(loads) <= 1.1 * sum(loads) / len(loads)
        total = sum(stream.nbytes for stream in schedule.streams)
        assert total == pytest.approx(
            sum(stored_bytes([entries[i] for i in plan.changed], kind, 2)), rel=0.01
        )
    assert sent[True] / sent[False] == pytest.approx(0.5 + 2 / 128**2, abs=1e-6)


def test_a_block_on_two_ranks_is_refused(tmp_path: Path) -> None:
    config = released_config("Qwen3-VL-30B-A3B", tmp_path, num_hidden_layers=2)
    plan = plan_of(config, Layout(), 1)
    kind = ServerLayout(4, 1, 4, fp8=True)
    with pytest.raises(ValueError, match=r"192 rows of model\.layers\.0\.mlp\.experts\.w13_weight"):
        make_schedule(plan, [Server("", kind, True)], torch.bfloat16, 2**28)

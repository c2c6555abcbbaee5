"""Full HF tensors on rank 0 from the ranks that hold the shards, and which of them a push sends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megavlm.models.common.config import ModelOptions
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.gather import gather, local_shards
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.sglang_layout import PIECE
from megavlm.weight_sync.trainable import trained_entries
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.runs import build
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.merged import add_pairs, merged

pytestmark = pytest.mark.distributed
ALL_LAYOUTS = {
    **LAYOUTS,
    **EXPERT_LAYOUTS,
    "expert TP2xDP2": Ranks(Layout(expert_tensor=2), data=2),  # experts are cut, nothing else is
}
BUCKET_BYTES = 2**16


def gathered(
    folder: Path,
    ranks: Ranks,
    full: bool,
    options: ModelOptions,
    targets: tuple[str, ...],
    by_stage: bool,
) -> dict[str, Any]:
    """Tensors by HF name that came together on this rank, how often each name came, and the ranks
    that give something. Adapters on `targets` have the pairs of `lora_reference`. `by_stage`: on
    the first rank of each pipeline stage, else all on rank 0.
    """
    config = inputs_of(folder).config
    mesh, entries, chunks = build(folder, config, ranks, options)
    if targets:
        add_pairs(chunks, targets)
    trainer = TrainerRanks.of(config, mesh.layout, mesh.world_size, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, targets or None))
    shards = local_shards(plan, chunks)  # asserts that this rank holds what the plan says
    tensors: list[tuple[str, torch.Tensor]] = []
    for bucket in plan.buckets(full=full, itemsize=4, max_bytes=BUCKET_BYTES):
        to = trainer.first_of(bucket.stage) if by_stage else 0
        tensors += gather(plan, bucket.entries, shards, torch.float32, to=to)
    return {
        "tensors": dict(tensors),
        "count": len(tensors),
        "source_ranks": {rank for source_ranks in plan.source_ranks for rank in source_ranks},
    }


def run(
    folder: Path,
    layout: str,
    *,
    full: bool,
    options: ModelOptions | None = None,
    targets: tuple[str, ...] = (),
    by_stage: bool = False,
) -> dict[str, Any]:
    ranks = ALL_LAYOUTS[layout]
    arguments = (folder, ranks, full, options or ModelOptions(), targets, by_stage)
    results = launch(ranks.world_size, gathered, *arguments)
    per_stage = ranks.world_size // ranks.mesh.pipeline if by_stage else ranks.world_size
    whole: dict[str, Any] = {}
    for rank, result in enumerate(results):
        assert bool(result["tensors"]) == (rank % per_stage == 0), "only those that send have any"
        assert result["count"] == len(result["tensors"]), "each name once"
        assert not whole.keys() & result["tensors"].keys()
        whole |= result["tensors"]
    return {"tensors": stacked(whole), "source_ranks": results[0]["source_ranks"]}


def stacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """Join the pieces of stacks of experts, which come in order."""
    whole: dict[str, Any] = {}
    pieces: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := PIECE.fullmatch(name):
            stack = pieces.setdefault(match[1], [])
            assert sum(map(len, stack)) == int(match[2]) and len(tensor) == int(match[3]) - int(
                match[2]
            )
            stack.append(tensor)
        else:
            whole[name] = tensor
    return whole | {name: np.concatenate(stack) for name, stack in pieces.items()}


def in_folder(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("model", "layout", "source_ranks"),
    [
        ("qwen2_5_vl", "TP2xDP2", {0, 1}),  # the first data rank's
        ("qwen3_vl", "PP2 virtual 2", {0, 1}),
        ("qwen3_vl_moe", "EP2xTP2+SP", {0, 1}),  # EP2 divides the same two ranks
        ("qwen3_vl_moe", "expert TP2xDP2", {0, 1}),
        *slow(
            ("qwen3_vl", "TP2xPP2", {0, 1, 2, 3}),
            ("qwen3_vl_moe", "EP2xPP2", {0, 1, 2, 3}),
            ("qwen3_vl_moe", "EP4", {0, 1, 2, 3}),
            ("qwen3_vl_moe", "expert TP2+SP", {0, 1}),
        ),
    ],
)
def test_shards_of_any_layout_arrive_whole(model: str, layout: str, source_ranks: set[int]) -> None:
    """Bit for bit, stacks of experts too."""
    folder = model_folder(model)
    expected = in_folder(folder)
    result = run(folder, layout, full=True, by_stage="PP2" in layout)
    assert result["tensors"].keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(result["tensors"][name], tensor, err_msg=name)
    assert result["source_ranks"] == source_ranks


def dtypes(folder: Path, ranks: Ranks) -> dict[str, torch.dtype]:
    """Return the dtypes in which a model in bfloat16 arrives, by HF name."""
    config, options = inputs_of(folder).config, ModelOptions(dtype=torch.bfloat16)
    mesh, entries, chunks = build(folder, config, ranks, options)
    trainer = TrainerRanks.of(config, mesh.layout, mesh.world_size, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    shards = local_shards(plan, chunks)
    everything = range(len(plan.entries))
    return {name: x.dtype for name, x in gather(plan, everything, shards, torch.bfloat16, to=0)}


def test_what_is_kept_in_fp32_is_sent_in_it() -> None:
    found, _ = launch(2, dtypes, model_folder("qwen3_5"), LAYOUTS["TP2"])
    kept = {name for name, dtype in found.items() if dtype == torch.float32}
    assert kept == {name for name in found if name.endswith(".A_log")} != set()
    assert {found[name] for name in found.keys() - kept} == {torch.bfloat16}


def test_a_stack_of_experts_comes_in_pieces_in_order() -> None:
    result = run(model_folder("qwen3_vl_moe"), "EP2", full=False)
    stacks = [name for name in result["tensors"] if ".mlp.experts." in name]
    assert len(stacks) == 2 * 3, "gate_up_proj and down_proj of each layer with experts"
    assert all(result["tensors"][name].shape[0] == 8 for name in stacks)


@pytest.mark.parametrize("layout", ["one rank", *slow("PP2", "TP2")])
def test_a_frozen_tower_is_left_out(layout: str) -> None:
    folder = model_folder("qwen3_vl")
    names = set(in_folder(folder))
    tower = {name for name in names if "visual." in name}
    mergers = {name for name in tower if "merger" in name}
    assert mergers < tower < names
    for options, left_out in (
        (ModelOptions(), tower),
        (ModelOptions(freeze_merger=False), tower - mergers),
        (ModelOptions(freeze_tower=False), mergers),
    ):
        sent = run(folder, layout, full=False, options=options)["tensors"]
        assert sent.keys() == names - left_out


@pytest.mark.parametrize(
    ("model", "layout", "targets"),
    [
        ("qwen2_5_vl", "TP2", ("language.attention", "language.mlp")),
        ("qwen3_vl_moe", "EP2", ("language.experts",)),
        *slow(
            ("qwen2_5_vl", "PP2", ("language.attention", "vision.merger")),
            ("qwen2_5_vl", "TP2xPP2", ("language.mlp",)),
            ("qwen3_vl_moe", "expert TP2+SP", ("language.experts", "language.attention")),
        ),
    ],
)
def test_adapters_are_sent_merged_and_only_their_targets(
    model: str, layout: str, targets: tuple[str, ...]
) -> None:
    folder = model_folder(model)
    expected, adapted = merged(folder, targets)
    sent = run(folder, layout, full=False, targets=targets)["tensors"]
    assert sent.keys() == adapted
    full = run(folder, layout, full=True, targets=targets)["tensors"]
    assert full.keys() == expected.keys()
    for name, tensor in expected.items():
        if name in adapted:
            scale = float(tensor.abs().max())
            np.testing.assert_allclose(full[name], tensor, atol=1e-6 * scale, err_msg=name)
            np.testing.assert_array_equal(full[name], sent[name])
        else:
            np.testing.assert_array_equal(full[name], tensor, err_msg=name)

"""Adapters between training and PEFT: what any layout saves comes out, what is imported goes in."""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_tools.lora.adapters import linears
from checkpoint_tools.lora.export_adapters import export_adapters
from checkpoint_tools.lora.import_adapters import import_adapters
from checkpoint_tools.lora.merge_adapters import merge_adapters
from checkpoint_tools.lora.step_adapters import step_adapters
from checkpoint_tools.weights import hub_weights, step_weights
from megavlm.checkpointing.adapter_settings import AdapterSettings
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.config.lora import LoRA
from megavlm.config.optimizer import Optimizer
from megavlm.models.common.components import lora_component
from megavlm.models.common.lora_targets import linear_names
from megavlm.training.optimizer import build_updater
from tests.parity.inputs import Inputs
from tests.parity.reference import Reference
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.lora_reference import ALPHA, RANK, heard, pair
from tests.support.lora_runs import DENSE, EXPERTS, TOWER, lora_folder, set_pairs, start
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import (
    load,
    load_adapters,
    logits,
    make_adapters,
    relative,
)

pytestmark = pytest.mark.distributed

RANKS = LAYOUTS | EXPERT_LAYOUTS
ONE = "one rank"
BASE = "models/tiny"


def save(folder: Path, ranks: Ranks, targets: tuple[str, ...], run_dir: Path) -> None:
    """As a run does, before its first step."""
    run = start(folder, ranks)
    run.add(LoRA(rank=RANK, alpha=ALPHA, targets=targets))
    set_pairs(run)
    updater = build_updater(run.chunks, Optimizer(lr=1e-2), run.mesh, num_steps=3)
    save_checkpoint(
        SaveTarget(run_dir / "checkpoints", folder, AdapterSettings(RANK, ALPHA, BASE)),
        1,
        updater,
        extra={},
    )


@pytest.mark.parametrize(
    ("model", "targets", "layouts"),
    [
        ("qwen2_5_vl", DENSE + TOWER, [ONE, "TP2+SP", "PP2"]),
        ("qwen3_vl_moe", EXPERTS, [ONE, "EP2"]),
        *slow(("qwen2_5_vl", DENSE + TOWER, [ONE, "TP4"])),
    ],
)
def test_every_layout_exports_the_same_bytes(
    model: str, targets: tuple[str, ...], layouts: list[str], tmp_path: Path
) -> None:
    hf = lora_folder(model)
    for layout in layouts:
        run_dir = tmp_path / layout
        launch(RANKS[layout].world_size, save, hf, RANKS[layout], targets, run_dir)
        done = export_adapters(run_dir / "checkpoints", run_dir / "peft")
        assert (done.step, done.rank, done.alpha) == (1, RANK, ALPHA)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert filecmp.cmp(tmp_path / ONE / "peft" / name, run_dir / "peft" / name, False), name

    peft = tmp_path / ONE / "peft"
    config = json.loads((peft / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
    tensors = load_file(peft / "adapter_model.safetensors")
    linear = "language_model.decoder.layers.1.self_attention.linear_qkv"
    place = "base_model.model.model.language_model.layers.1.self_attn.k_proj"
    a, b = (tensors[f"{place}.lora_{side}.weight"] for side in "AB")
    for ours, expected in zip((a, b), pair((linear, "k_proj"), len(b), a.size(1)), strict=True):
        assert torch.equal(ours, expected)

    merge_adapters(tmp_path / layouts[-1] / "checkpoints", tmp_path / "merged")
    theirs = logits(load_adapters(hf, peft))
    assert relative(logits(load(tmp_path / "merged")), theirs) < 1e-5
    assert relative(logits(load(hf)), theirs) > 1e-2


def trained(folder: Path, merged: Path, checkpoint: Path, settings: LoRA) -> dict[str, Any]:
    """Our model with the checkpoint's adapters against transformers on the merged folder."""
    run = start(folder, LAYOUTS[ONE])
    (model,) = run.chunks
    names = linear_names(model.config, model.visual)
    run.add(settings)
    load_checkpoint(checkpoint, chunks=run.chunks)
    reference = Reference(merged)
    cases = Inputs(folder).sequences(heard(reference.config))
    worst = 0.0
    for pack, group, ours in zip(run.packs, run.groups, run.logits(), strict=True):
        rows: list[Tensor] = []
        for index in group:
            case = cases[index]
            rows += [reference.scores(case.prompt, one).logits.detach() for one in case.responses]
        theirs = torch.cat(rows)[pack.target_index]
        worst = max(worst, relative(ours, theirs))
    return {"names": names, "difference": worst}


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        "qwen3_vl_moe",
        *slow("qwen2_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"),
        *slow("internvl", "internvl_moe", "minicpmv4_6", "qwen3_omni_moe"),
    ],
)
def test_training_starts_from_imported_adapters(
    family: str, hf_folder: Folder, tmp_path: Path
) -> None:
    hf = hf_folder(family)
    make_adapters(hf, tmp_path / "peft", rank_pattern={"v_proj": 2})
    done = import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    merge_adapters(tmp_path / "checkpoint", tmp_path / "merged")
    settings = LoRA(rank=done.rank, alpha=done.alpha, targets=tuple(done.targets))
    (result,) = launch(1, trained, hf, tmp_path / "merged", tmp_path / "checkpoint", settings)
    assert result["difference"] < 1e-5
    # The linears that this command knows are those that training has.
    ours = {
        linear.replace("experts.experts", "experts"): linear for linear in linears(hub_weights(hf))
    }
    assert {name: lora_component(linear) for name, linear in ours.items()} == result["names"]


def test_zeros_are_all_that_is_added(hf_folder: Folder, tmp_path: Path) -> None:
    """Projections and ranks that PEFT did not train stay out of training: A and B are zero."""
    hf = hf_folder("qwen2_5_vl")
    make_adapters(
        hf, tmp_path / "peft", target_modules=["self_attn.q_proj"], rank_pattern={"1.*": 2}
    )
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    adapters = step_adapters(step_weights(tmp_path / "checkpoint"))
    for projection in adapters.projections():
        a, b = adapters.read(projection)
        rank = 0 if projection.part != "q_proj" else 2 if "layers.1." in projection.linear else 4
        assert a[:rank].any(1).all() and b[:, :rank].any(0).all()
        assert not a[rank:].any() and not b[:, rank:].any()

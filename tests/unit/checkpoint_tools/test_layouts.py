"""HF -> checkpoint -> a model under any layout -> training checkpoint -> HF: every byte is back.

All of a real run but its steps: the model is built empty, loaded, and saved with its optimizer's
state.
"""

import filecmp
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.weights import step_weights
from megavlm import checkpointing
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import local_tensors
from megavlm.models.registry import build_model
from megavlm.parallel.mesh import build_mesh
from megavlm.training.optimizer import build_updater
from tests.distributed.fork import launch
from tests.parity.table import EXPERT_LAYOUTS, FAMILIES, LAYOUTS, Ranks
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoints.ranks import SETTINGS

MOE = ("qwen3_vl_moe",)
CASES = {
    "one rank": FAMILIES,
    "TP2+SP": FAMILIES,
    "PP2": FAMILIES,
    "TP2+SPxPP2": FAMILIES,
    "TP4": ("qwen2_5_vl",),
    "EP2": MOE,
    "EP2xPP2": MOE,
    "expert TP2+SP": MOE,
}
STEP = 7
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def in_bf16(hf_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Real models are: here too, but one."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("bf16") / family
        shutil.copytree(hf_folder(family), folder)
        if family != "qwen2_vl":
            path = folder / "model.safetensors"
            tensors = {name: x.bfloat16() for name, x in load_file(path).items()}
            save_file(tensors, path, {"format": "pt"})
            text = (folder / "config.json").read_text()
            (folder / "config.json").write_text(text.replace("float32", "bfloat16"))
        import_hf(folder, folder / "checkpoint")
        return folder

    return make


def load_and_save(folders: list[Path], ranks: Ranks, target: Path) -> None:
    """Models of several families in turn, under one layout."""
    mesh = build_mesh(ranks.mesh)
    for folder in folders:
        config = AutoConfig.from_pretrained(folder)
        options = ModelOptions(
            dtype=config.dtype, sequence=ranks.sequence, freeze_tower=False, freeze_merger=False
        )
        chunks = build_model(config, mesh, options)
        for chunk in chunks:
            for tensor in local_tensors(chunk):
                tensor.data.detach().fill_(float("nan"))
        checkpointing.load(folder / "checkpoint", chunks=chunks)
        updater = build_updater(chunks, SETTINGS, num_steps=10)
        checkpointing.save(
            target / folder.name,
            STEP,
            chunks=chunks,
            optimizer=updater.optimizer,
            scheduler=updater.scheduler,
            extra={},
            hf_folder=folder,
        )


@pytest.mark.distributed
@pytest.mark.parametrize("layout", CASES)
def test_every_byte_comes_back_from_every_layout(
    layout: str, in_bf16: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    folders = [in_bf16(family) for family in CASES[layout]]
    launch(ranks.world_size, load_and_save, folders, ranks, tmp_path)
    for folder in folders:
        saved, out = tmp_path / folder.name, tmp_path / "out" / folder.name
        manifest = step_weights(saved).manifest
        assert manifest is not None and manifest.has_optimizer
        assert manifest.layout["tensor"] == ranks.mesh.tensor
        assert export_hf(saved, out).step == STEP
        before, after = load_file(folder / FILE), load_file(out / FILE)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype, name
            assert torch.equal(after[name], tensor), name
        # And the file is the one that an import alone gives.
        if not (folder / "out").exists():
            export_hf(folder / "checkpoint", folder / "out")
        assert filecmp.cmp(folder / "out" / FILE, out / FILE, shallow=False)

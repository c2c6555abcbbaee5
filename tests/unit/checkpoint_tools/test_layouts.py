"""HF -> checkpoint -> models under one layout after the other -> HF: every byte is back.

All of a real run but its steps: the model is built empty, loads what the layout before has saved,
and is saved with its optimizer's state; every save is exported.
"""

import filecmp
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.weights import step_weights
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.model_config import model_config
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import local_tensors
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.training.optimizer import build_updater
from tests.parity.table import FAMILIES, Ranks
from tests.support.families import model_type
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpointing.ranks import SETTINGS

# Pairs of tensor and pipeline ranks; experts are spread over the ranks that these leave, or over
# data ranks where there are none.
SIZES = [(4, 2), (2, 2), (2, 1), (1, 1)]
EXPERTS = {
    "expert TP2": Ranks(Layout(tensor=2, expert_tensor=2), sequence=True),
    **{
        f"TP{tensor} x PP{pipeline} x EP2": Ranks(
            Layout(tensor=tensor, pipeline=pipeline, expert=2),
            data=2 if tensor == 1 else 1,
            sequence=tensor > 1,
        )
        for tensor, pipeline in SIZES
    },
}
DENSE = {
    f"TP{tensor} x PP{pipeline}": Ranks(
        Layout(tensor=tensor, pipeline=pipeline), sequence=tensor > 1
    )
    for tensor, pipeline in SIZES
}
QUICK = "TP2 x PP2"  # the one of `make test`: first, as each loads what the one before has saved
CASES = {QUICK: DENSE[QUICK]} | EXPERTS | DENSE
MOE = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "internvl_moe", "qwen3_omni_moe")
IN_FP32 = (".A_log", ".e_score_correction_bias")  # whatever the model's dtype is
STEP = 7
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A model and its import. Real ones are in bf16: here too, but one."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("bf16") / family
        make_tiny_model(
            folder,
            ["red"],
            seed=3,
            family=model_type(family),
            num_layers=2,
            num_heads=8,
            num_kv_heads=4,
            vision_depth=1,
            tied_embeddings=family == "qwen2_vl",
            randomise_norms_and_biases=True,
            **({"dense_layers": [0]} if family in ("qwen3_vl_moe", "qwen3_omni_moe") else {}),
            **({"num_experts": 4} if family == "internvl_moe" else {}),
        )
        if family != "qwen2_vl":
            path = folder / FILE
            tensors = {
                name: x if name.endswith(IN_FP32) else x.bfloat16()
                for name, x in load_file(path).items()
            }
            save_file(tensors, path, {"format": "pt"})
            text = (folder / "config.json").read_text()
            (folder / "config.json").write_text(text.replace("float32", "bfloat16"))
        import_hf(folder, folder / "checkpoint")
        return folder

    return make


@pytest.fixture(scope="module")
def saved(in_bf16: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """By case: a training checkpoint of each family that can have the layout."""
    cases = list(CASES)

    @cache
    def make(case: str) -> Path:
        target = tmp_path_factory.mktemp("saved")
        sources = {}
        for family in families(case):
            before = [one for one in cases[: cases.index(case)] if family in families(one)]
            hf = in_bf16(family)
            sources[hf] = make(before[-1]) / hf.name if before else hf / "checkpoint"
        ranks = CASES[case]
        launch(ranks.world_size, load_and_save, sources, ranks, target)
        return target

    return make


def families(case: str) -> tuple[str, ...]:
    return MOE if case in EXPERTS else FAMILIES


def load_and_save(sources: dict[Path, Path], ranks: Ranks, target: Path) -> None:
    """Models of several HF folders in turn, from their checkpoints, under one layout."""
    mesh = build_mesh(ranks.mesh)
    for folder, checkpoint in sources.items():
        config = model_config(folder)
        options = ModelOptions(
            dtype=config.dtype or torch.bfloat16,
            sequence=ranks.sequence,
            freeze_tower=False,
            freeze_merger=False,
        )
        chunks = build_model(config, mesh, options)
        for chunk in chunks:
            for tensor in local_tensors(chunk):
                tensor.data.detach().fill_(float("nan"))
        load_checkpoint(checkpoint, chunks=chunks)
        updater = build_updater(chunks, SETTINGS, mesh, num_steps=10)
        save_checkpoint(SaveTarget(target / folder.name, folder), STEP, updater, extra={})


@pytest.mark.distributed
@pytest.mark.parametrize("case", [QUICK, *slow(*(case for case in CASES if case != QUICK))])
def test_every_byte_comes_back_from_every_layout(
    case: str, in_bf16: Folder, saved: Folder, tmp_path: Path
) -> None:
    ranks = CASES[case]
    for folder in map(in_bf16, families(case)):
        checkpoint, out = saved(case) / folder.name, tmp_path / folder.name
        manifest = step_weights(checkpoint).manifest
        assert manifest is not None and manifest.has_optimizer
        assert manifest.layout == {**vars(ranks.mesh), "data": manifest.layout["data"]}
        assert export_hf(checkpoint, out).step == STEP
        before, after = load_file(folder / FILE), HFFolder(out)
        assert before.keys() == set(after)
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype, name
            assert torch.equal(after[name], tensor), name
        # And the files are those that an import alone gives.
        if not (folder / "out").exists():
            export_hf(folder / "checkpoint", folder / "out")
        files = sorted(path.name for path in out.glob("*.safetensors"))
        assert filecmp.cmpfiles(folder / "out", out, files, shallow=False) == (files, [], [])

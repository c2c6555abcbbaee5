"""What a run starts with: fresh adapters, or those of `model.checkpoint`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from checkpoint_tools.draft_head import make_draft_head
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.lora.import_adapters import import_adapters
from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.config.load import load
from megavlm.families import family
from megavlm.models.common.hf_source import HFFolder
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.training.initial_model import start_model, starting_step
from tests.conftest import row, write_rows
from tests.support.draft_head import add_draft_head
from tests.support.fork import launch
from tests.unit.checkpoint_tools.lora_models import make_adapters
from tests.unit.checkpointing.ranks import make_hf

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("start") / "hf")


@pytest.fixture(scope="module")
def adapted(hf: Path) -> Path:
    make_adapters(hf, hf.parent / "peft", target_modules=r".*language_model.*\.(q|v|down)_proj")
    import_adapters(hf.parent / "peft", hf.parent / "checkpoint", base=hf)
    return hf.parent / "checkpoint"


def started(recipe: Path) -> tuple[dict[str, bool], int]:
    """Whether each adapter's tensor is the checkpoint's, by key; parameters that are trained."""
    config = load(recipe)
    hf_config = AutoConfig.from_pretrained(config.model.folder)
    entries = family(hf_config.model_type).mapping(hf_config)
    mesh = build_mesh(Layout.from_config(config.parallel), seed=0)
    (model,) = start_model(config, starting_step(config), hf_config, entries, mesh, "tokens")
    assert config.model.checkpoint is not None
    reader = StepReader(step_folder(Path(config.model.checkpoint), 0))
    equal = {
        name: torch.equal(parameter, reader.read(name))
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    return equal, sum(parameter.requires_grad for parameter in model.parameters())


def write_recipe(folder: Path, hf: Path, checkpoint: Path, **lora: Any) -> Path:
    files = [write_rows(folder / "rows.parquet", [row()])]
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"folder": str(hf), "checkpoint": str(checkpoint)},
        "lora": {"rank": 4, "alpha": 6.0} | lora,
        "data": {"train_files": files, "test_files": files},
        "algorithm": {"name": "sft", "steps": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


TARGETS = [
    "language_model.decoder.layers.*.self_attention.linear_qkv",
    "language_model.decoder.layers.*.mlp.linear_fc2",
]


def test_a_run_goes_on_with_a_checkpoint_s_adapters(
    hf: Path, adapted: Path, tmp_path: Path
) -> None:
    ((equal, trained),) = launch(1, started, write_recipe(tmp_path, hf, adapted, targets=TARGETS))
    assert trained == len(equal) > 0 and all(equal.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": TARGETS, "alpha": 32.0}, "lora.alpha=32 differs from the alpha .*alpha=6"),
        ({"targets": TARGETS, "rank": 8}, "has shape"),
        ({"targets": TARGETS[:1]}, "no place for .*linear_fc2.lora_A"),
        ({"rank": 0}, "no place for .*lora-merge"),
    ],
)
def test_settings_that_are_not_the_checkpoint_s_are_refused(
    hf: Path, adapted: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    recipe = write_recipe(tmp_path, hf, adapted, **settings)
    with pytest.raises(RuntimeError, match=message):
        launch(1, started, recipe)


@pytest.mark.slow
def test_a_draft_head_comes_from_the_folder_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    """It is trained beside adapters; a separate critic has none."""
    plain = make_hf(tmp_path / "plain", family="qwen3_5", num_layers=1)
    import_hf(plain, tmp_path / "checkpoint")
    hf = add_draft_head(plain, tmp_path / "hf", like=0)
    recipe = write_recipe(tmp_path, hf, tmp_path / "checkpoint", targets=["language.mlp"])
    launch(1, check_draft_head, recipe, HFFolder(hf)["mtp.fc.weight"])


@pytest.mark.slow
def test_an_eagle3_head_comes_from_its_folder(tmp_path: Path) -> None:
    """A run that starts from the model's folder, and one from a checkpoint that has no head."""
    hf = make_hf(tmp_path / "hf", family="qwen3_vl")
    import_hf(hf, tmp_path / "checkpoint")
    head = tmp_path / "head"
    make_draft_head(hf, head, seed=3)
    recipe = write_recipe(tmp_path, hf, tmp_path / "checkpoint", targets=["language.mlp"])
    weight = HFFolder(head)["fc.weight"]
    named = f"rollout.server_args.speculative_draft_model_path={head}"
    for source in ([], ["model.checkpoint=null"]):
        launch(1, check_draft_head, recipe, weight, [named, *source])


def check_draft_head(recipe: Path, weight: torch.Tensor, overrides: Sequence[str] = ()) -> None:
    config = load(recipe, ["speculation.train=true", *overrides])
    hf_config = AutoConfig.from_pretrained(config.model.folder)
    entries = family(hf_config.model_type).mapping(hf_config, draft_head=True)
    mesh = build_mesh(Layout.from_config(config.parallel), seed=0)
    step = starting_step(config)
    (model,) = start_model(config, step, hf_config, entries, mesh, "tokens")
    assert model.draft_head is not None
    assert torch.equal(model.draft_head.fc.weight, weight)
    trained = {name.split(".")[0] for name, x in model.named_parameters() if x.requires_grad}
    assert trained == {"language_model", "draft_head"}
    (critic,) = start_model(config, step, hf_config, entries, mesh, "values")
    assert critic.draft_head is None

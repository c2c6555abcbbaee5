"""A family touches its folder and families.py: no other module names one or needs a change."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3VLConfig

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.data.processor import Processor
from megavlm.families import FAMILIES, Family, family, family_of
from megavlm.models.build import build_model
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.sizes import rank_parameters
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.planner.weight_updates import weight_update_table
from megavlm.run.checks import preflight
from tests.parity.models import make_model
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.data.media.test_videos import row, video

ROOT = Path(__file__).parents[3]
NEW = "made_up_vl"


class MadeUpConfig(Qwen3VLConfig):  # transformers' side of a new family
    model_type = NEW


def product() -> Iterator[Path]:
    """Modules that know no family: all but families.py and the families' own folders."""
    known = {ROOT / part.package.replace(".", "/") for part in FAMILIES.values()}
    for top in ("megavlm", "checkpoint_tools"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path != ROOT / "megavlm/families.py" and path.parent not in known:
                yield path


def test_no_other_module_names_a_family() -> None:
    names = re.compile(rf"\b({'|'.join(FAMILIES)})\b")
    packages = tuple(part.package for part in FAMILIES.values())
    for path in product():
        source = path.read_text(encoding="utf-8")
        if not any(name in source for name in (*FAMILIES, *packages)):
            continue
        tree = ast.parse(source)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        words = (x for x in ast.walk(tree) if isinstance(x, ast.Constant) and id(x) not in docs)
        text = [x.value for x in words if isinstance(x.value, str)]
        assert not [word for word in text if names.search(word)], path
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in modules if name and name.startswith(packages)], path


@pytest.mark.parametrize("name", [list(FAMILIES)[-1], *slow(*list(FAMILIES)[:-1])])
def test_checks_and_prompts_of_a_family_do_without_megatron(name: str) -> None:
    package = FAMILIES[name].package
    code = (
        f"import sys, {package}.config\n"
        "heavy = {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        f"import {package}.inputs\n"
        "sys.exit(str(heavy or '') + 'megatron' * ('megatron' in sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("model_type", ["llama", None, ["qwen2_vl"], {}])
def test_other_model_types_are_refused(model_type: object) -> None:
    with pytest.raises(
        ValueError, match="is not supported: use one of glm4v, glm4v_moe, internvl, minicpmv4_6"
    ):
        family(model_type)


@pytest.fixture
def new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Registers a copy of Qwen3-VL's package, outside megavlm, and returns a model's folder."""
    old = "megavlm.models.qwen3_vl"
    package = Path(shutil.copytree(ROOT.joinpath(*old.split(".")), tmp_path / "packages" / NEW))
    for module in package.glob("*.py"):
        module.write_text(module.read_text().replace(old, NEW))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(FAMILIES, NEW, Family(NEW))
    AutoConfig.register(NEW, MadeUpConfig, exist_ok=True)
    folder = tmp_path / "hf"
    make_model(folder, "qwen3_vl", tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": NEW}))
    return folder


def embedding(folder: Path) -> torch.Tensor:
    """The language model's, after the folder's weights are loaded."""
    config, mesh = AutoConfig.from_pretrained(folder), build_mesh()
    (chunk,) = build_model(config, mesh)
    load_hf(chunk, family(NEW).mapping(config), HFFolder(folder), mesh)
    weight: torch.Tensor = chunk.language_model.embedding.word_embeddings.weight
    return weight.detach()


def test_a_new_family(new_family: Path, tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    config = load(write_recipe(model={"folder": str(new_family)}))
    preflight.check(config, world_size=1)

    processor = Processor(new_family, Data(), family_of(new_family))
    prompt = processor.prompt(row("<video>What color is it?", video(4)))
    assert (prompt.token_ids == processor.video_token_id).any()

    hf_config = AutoConfig.from_pretrained(new_family)
    assert type(hf_config) is MadeUpConfig
    held = rank_parameters(hf_config, Layout(), 1, 0)
    assert {x.component for x in held} == {"tower", "embedding", "attention", "mlp", "output"}

    tensors = load_file(new_family / "model.safetensors")
    (ours,) = launch(1, embedding, new_family)
    assert torch.equal(torch.from_numpy(ours), tensors["model.language_model.embed_tokens.weight"])
    import_hf(new_family, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert tensors.keys() == exported.keys()
    assert all(torch.equal(tensors[name], exported[name]) for name in tensors)

    text = weight_update_table(config, 1)
    assert "tower" in text and "attention" in text
    assert config.model.freeze_tower and "no rank" in text

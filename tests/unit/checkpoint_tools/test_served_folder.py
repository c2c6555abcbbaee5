"""An adapter's folder, as `megavlm evaluate --model` serves it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megavlm.run.model_paths import served_folder
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import load, logits, make_adapters, relative


def test_an_adapter_is_served_merged_into_the_recipes_model(
    hf_folder: Folder, tmp_path: Path
) -> None:
    hf = hf_folder("qwen2_5_vl")
    adapted = make_adapters(hf, tmp_path / "peft")
    config: Any = SimpleNamespace(
        model=SimpleNamespace(folder=str(hf), checkpoint=None),
        rollout=SimpleNamespace(mode="managed"),
    )
    with served_folder(config, str(tmp_path / "peft")) as folder:
        assert (folder / "preprocessor_config.json").is_file(), "the processor comes with it"
        served = logits(load(folder))
    assert relative(served, logits(adapted)) < 1e-5
    assert relative(served, logits(load(hf))) > 1e-3, "the adapter does something"

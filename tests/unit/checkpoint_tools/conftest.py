import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.lora.import_adapters import import_adapters
from tests.parity.models import make_model
from tests.unit.checkpoint_tools.lora_models import make_adapters

ADAPTED = "qwen2_5_vl"
Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The HF folder of a family's tiny model, in fp32, not to be written to."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "hf"
        make_model(folder, family, tied=family == "qwen2_vl")
        return folder

    return make


@pytest.fixture(scope="session")
def imported(hf_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The checkpoint made of it, not to be written to."""

    @cache
    def convert(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "checkpoint"
        import_hf(hf_folder(family), folder)
        return folder

    return convert


@pytest.fixture(scope="session")
def made(hf_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters as PEFT saves them, of ADAPTED's model, and the checkpoint made of them; not to be
    written to.
    """
    folder = tmp_path_factory.mktemp("adapters")
    make_adapters(hf_folder(ADAPTED), folder / "peft", target_modules=["self_attn.k_proj"])
    import_adapters(folder / "peft", folder / "checkpoint", base=hf_folder(ADAPTED))
    return folder


@pytest.fixture
def peft(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "peft", tmp_path / "in" / "peft"))

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from checkpoint_tools.import_hf import import_hf
from tests.parity.models import make_model

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

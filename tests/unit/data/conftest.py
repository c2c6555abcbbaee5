"""Tiny model folders of every family, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megavlm.demo.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        texts = ["What color is it?", "red", "<1.5 seconds>"] * 50
        factor = 32 if family.startswith("qwen3") else 28
        make_tiny_model(folder, texts, seed=0, family=family, max_pixels=256 * factor**2)
        return folder

    return make

"""The proof of an export: whole logits of one pack on every rank, whatever the layout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megavlm.models.common.config import ModelOptions
from megavlm.run.export import _trainer_logits
from megavlm.training.gradient_buffers import wrap
from tests.parity.cases import packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.parity.runs import build
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed


def logits(folder: Path, ranks: Ranks, cases: Any) -> Any:
    config = inputs_of(folder).config
    mesh, _, chunks = build(folder, config, ranks, ModelOptions())
    pack, *_ = packs_of([cases], config, ranks)
    train_state: Any = SimpleNamespace(mesh=mesh, updater=SimpleNamespace(chunks=wrap(chunks)))
    return _trainer_logits(train_state, pack, distinct_images(cases))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3_vl", "TP2+SPxPP2 virtual 2"),
        ("qwen3_vl", "CP2xDP2"),
        ("qwen3_vl_moe", "EP2 over TP2+SP"),
        *slow(("qwen3_vl", "TP2xDP2"), ("qwen3_vl", "PP2xCP2"), ("qwen3_vl_moe", "EP2xPP2")),
    ],
)
def test_every_rank_gets_the_logits_of_one(model: str, layout: str) -> None:
    folder = model_folder(model)
    cases = inputs_of(folder).sequences("mixed")[:4]
    (expected,) = launch(1, logits, folder, LAYOUTS["one rank"], cases)
    assert len(expected) == sum(len(response) for case in cases for response in case.responses)
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    for found in launch(ranks.world_size, logits, folder, ranks, cases):
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()

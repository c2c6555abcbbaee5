"""Learning rates of the tower and the merger: every tensor trains as if all had its rate."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.models.common.components import model_part
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.checkpointing.ranks import Name, make_hf, start

pytestmark = pytest.mark.distributed
RATES = {"rest": 1e-2, "tower": 5e-3, "merger": 2e-3}
OWN_RATES = {f"{part}_lr": RATES[part] for part in ("tower", "merger")}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("rates") / "hf")


def trained(
    hf: Path, ranks: Ranks, dtype: torch.dtype, keys: dict[str, float], source: Path | None
) -> tuple[dict[Name, torch.Tensor], float]:
    """Weights after three updates, from `source` or the start, and the recorded rate."""
    run = start(hf, ranks, freeze=False, dtype=dtype, optimizer=keys)
    if source is not None:
        run.load(source)
    run.train(range(3))
    return {name: tensor.float() for name, tensor in run.weights().items()}, (
        run.updater.learning_rate
    )


def save(hf: Path, ranks: Ranks, folder: Path, keys: dict[str, float]) -> None:
    run = start(hf, ranks, freeze=False, optimizer=keys)
    run.train(range(2))
    run.save(folder, 2)


def check_parts(hf: Path, ranks: Ranks, source: Path | None = None, dtype: Any = None) -> None:
    dtype = dtype or torch.float32

    def run(keys: dict[str, float]) -> list[Any]:
        return launch(ranks.world_size, trained, hf, ranks, dtype, keys, source)

    found, expected = run(OWN_RATES), {part: run({"lr": rate}) for part, rate in RATES.items()}
    seen = set()
    for rank, (weights, rate) in enumerate(found):
        assert rate == expected["rest"][rank][1], "the rate of all other weights is recorded"
        for name, tensor in weights.items():
            part = model_part(name[0])
            part = part if part in RATES else "rest"
            seen.add(part)
            assert tensor.tolist() == expected[part][rank][0][name].tolist(), name
    assert seen == {*RATES}


@pytest.mark.parametrize("layout", ["one rank", *slow("TP2", "PP2", "DP2")])
def test_each_part_trains_at_its_rate(hf: Path, layout: str) -> None:
    check_parts(hf, LAYOUTS[layout])


def test_weights_of_two_dtypes_train_at_their_rates(hf: Path) -> None:
    check_parts(hf, LAYOUTS["one rank"], dtype=torch.bfloat16)


@pytest.mark.parametrize("saved", [{}, OWN_RATES], ids=["without rates", "with rates"])
def test_rates_may_come_and_go_at_a_resume(
    hf: Path, tmp_path: Path, saved: dict[str, float]
) -> None:
    ranks = LAYOUTS["one rank"]
    launch(ranks.world_size, save, hf, ranks, tmp_path, saved)
    check_parts(hf, ranks, tmp_path)

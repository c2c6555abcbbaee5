"""Measures over all packs of all ranks, from the last stage, on every rank."""

import time
from datetime import timedelta

import pytest
import torch

from megavlm.parallel.collectives import barrier, reduce_measures, scatter
from megavlm.parallel.mesh import Layout, build_mesh
from tests.distributed.fork import launch
from tests.parity.table import LAYOUTS, Ranks

pytestmark = pytest.mark.distributed


def reduced(ranks: Ranks) -> dict[str, float]:
    """Two packs on each last-stage rank; tensor ranks report the same."""
    mesh = build_mesh(ranks.mesh)
    share = 1 + mesh.data_rank * ranks.mesh.context + mesh.context_rank
    reports = [
        {"tokens": torch.tensor(share * factor), "largest_gap": torch.tensor(-1.0 / share / factor)}
        for factor in (1.0, 10.0)
    ]
    return reduce_measures(reports if mesh.is_last_stage else [], mesh)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        ("one rank", 1),
        ("TP2", 1),
        ("PP2", 1),
        ("PP2 virtual 2", 1),
        ("CP2", 2),
        ("TP2xPP2", 1),
        ("PP2xCP2", 2),
        ("PP2xDP2", 2),
        ("CP2xDP2", 4),
    ],
)
def test_sums_and_maxima(layout: str, shares: int) -> None:
    ranks = LAYOUTS[layout]
    results = launch(ranks.world_size, reduced, ranks)
    tokens = 11.0 * sum(range(1, shares + 1))
    expected = {"tokens": tokens, "largest_gap": pytest.approx(-0.1 / shares)}
    assert results == [expected] * ranks.world_size


def given(ranks: Ranks) -> int:
    mesh = build_mesh(ranks.mesh)
    return scatter([10, 11, 12, 13] if mesh.is_driver else None, mesh)


def test_scatter_gives_each_rank_its_part() -> None:
    assert launch(4, given, LAYOUTS["TP2xPP2"]) == [10, 11, 12, 13]


def waited(seconds: float) -> str:
    """Rank 1 works for two seconds while rank 0 waits for its object."""
    mesh = build_mesh(Layout(), timeout=timedelta(seconds=seconds))
    if mesh.rank == 1:
        time.sleep(2)
    try:
        barrier(mesh)
    except RuntimeError as error:
        return str(error)
    return "arrived"


@pytest.mark.parametrize(("seconds", "arrives"), [(60.0, True), (0.5, False)])
def test_ranks_wait_for_objects_as_long_as_the_mesh_says(seconds: float, arrives: bool) -> None:
    (answer, _) = launch(2, waited, seconds)
    assert (answer == "arrived") is arrives
    assert arrives or "Timed out" in answer

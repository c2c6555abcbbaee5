"""Measures over all packs of all ranks, from the last stage, on every rank."""

from datetime import timedelta

import pytest
import torch

from megavlm.parallel.collectives import (
    receive_from_driver,
    reduce_measures,
    scatter,
    send_each,
)
from megavlm.parallel.mesh import TIMEOUT, Layout, build_mesh
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch

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


def given(ranks: Ranks) -> tuple[bytes, bytes | None]:
    """What this rank gets as a rank of its data rank, and of its own."""
    mesh = build_mesh(ranks.mesh)
    parts = None
    if mesh.is_driver:
        parts = [part(data_rank) for data_rank in range(mesh.data_size)]
    scattered = scatter(parts, mesh)
    if mesh.is_driver:
        send_each({rank: part(10 + rank) for rank in range(1, mesh.world_size)}, mesh)
        return scattered, None
    return scattered, receive_from_driver(mesh)


def part(number: int) -> bytes:
    return bytes(range(number, 2 * number + 1))


@pytest.mark.parametrize("layout", ["one rank", "TP2xPP2", "PP2xDP2", "CP2xDP2"])
def test_parts_reach_the_ranks_of_their_data_rank(layout: str) -> None:
    ranks = LAYOUTS[layout]
    slots = ranks.mesh.tensor * ranks.mesh.context
    num_data_ranks = ranks.world_size // ranks.mesh.model_size
    for rank, (scattered, sent) in enumerate(launch(ranks.world_size, given, ranks)):
        assert scattered == part(rank // slots % num_data_ranks)
        assert sent == (part(10 + rank) if rank else None)


def time_limits() -> set[timedelta]:
    groups = build_mesh(Layout(tensor=2))
    options = [
        group._get_backend(torch.device("cpu")).options
        for group in (groups.groups.tp, groups.groups.dp_cp, groups.objects)
    ]
    return {option._timeout for option in options}


def test_all_groups_wait_as_long_as_a_rollout_may_take() -> None:
    assert launch(2, time_limits) == [{TIMEOUT}] * 2

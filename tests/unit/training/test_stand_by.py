"""What the driver does alone, and the pushes that it may ask all ranks for meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.rollout.errors import WeightSyncError
from megavlm.training.loop import Loop
from tests.distributed.fork import launch


class Fleet:
    """Servers that die in some of the pushes."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.waited = 0

    def wait_for_targets(self) -> int:
        self.waited += 1
        return 0

    def died_since(self, deaths: int) -> bool:
        return self.deaths > 0


class Sync:
    """Fails on every rank as often as it is told, as a push does."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.pushes = 0

    def push(self, step: int) -> None:
        dist.barrier()  # a push is collective
        self.pushes += 1
        if self.pushes <= self.failures:
            raise WeightSyncError("the server has died")


def loop_of(deaths: int, failures: int) -> Any:
    loop: Any = Loop.__new__(Loop)
    loop.session = SimpleNamespace(step=3, mesh=SimpleNamespace(objects=None))
    is_driver = dist.get_rank() == 0
    loop.driver = SimpleNamespace(fleet=Fleet(deaths)) if is_driver else None
    loop.sync, loop.sharing = Sync(failures), None
    return loop


def refits_twice() -> Any:
    loop = loop_of(0, 0)

    def work() -> str:
        loop.refit()
        loop.refit()
        return "done"

    first = loop.stand_by(work)
    return first, loop.stand_by(lambda: "again"), loop.sync.pushes


def pushes(deaths: int, failures: int) -> Any:
    loop = loop_of(deaths, failures)
    try:
        loop.push()
    except WeightSyncError as error:
        return str(error)
    return loop.sync.pushes


def test_every_rank_takes_part_in_what_the_driver_asks_for() -> None:
    assert launch(2, refits_twice) == [("done", "again", 2), (None, None, 2)]


@pytest.mark.parametrize(
    ("deaths", "failures", "outcome"),
    [(0, 0, 1), (1, 1, 2), (0, 1, "the server has died")],
)
def test_a_push_in_which_the_servers_die_is_made_again(
    deaths: int, failures: int, outcome: Any
) -> None:
    assert launch(2, pushes, deaths, failures) == [outcome] * 2

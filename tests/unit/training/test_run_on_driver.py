"""Weight pushes: retries, work on the driver alone, and the pushes that it may request."""

from collections.abc import Container, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.inference.errors import ServersFailed, TrainerFault, WeightSyncError
from megavlm.inference.server_pool.state import State
from megavlm.observability.phases import Phases
from megavlm.training.colocate import SharedMemory
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.update import SyncReport
from tests.support.fork import launch


class ServerPool:
    """Servers that recover at once."""

    def wait_for_receivers(self) -> None:
        pass

    def wait_while(self, *states: State) -> None:
        pass

    def answering(self) -> list[str]:
        return ["a"]


class Sync:
    """Weight sync that fails on every rank with the given errors, before it succeeds."""

    def __init__(self, errors: Sequence[WeightSyncError]) -> None:
        self.errors = [*errors]
        self.without: list[Container[str]] = []
        self.version: int | None = None

    def update_weights(self, step: int, *, without: Container[str]) -> SyncReport:
        dist.barrier()  # a push is collective
        self.without.append(without)
        if self.errors:
            raise self.errors.pop(0)
        self.version = step
        return SyncReport(seconds=0.1, bytes=7, tensors=2, checked=3, servers=1)


def pusher(*errors: WeightSyncError, keeps_weights: bool | None = None) -> Any:
    """A pusher whose first pushes fail with these errors. keeps_weights: None for servers that have
    GPUs of their own.
    """
    is_driver = dist.get_rank() == 0
    mesh = SimpleNamespace(objects=None, is_driver=is_driver)
    state: Any = SimpleNamespace(step=3, mesh=mesh, phases=Phases())
    server_pool: Any = ServerPool() if is_driver else None
    sync: Any = Sync(errors)
    memory = None
    if keeps_weights is not None:
        memory = SharedMemory({}, None, state.mesh, keeps_weights=keeps_weights)
    return WeightPusher(state, sync, server_pool, memory)


def works_twice(keeps_weights: bool) -> int:
    weights = pusher(keeps_weights=keeps_weights)
    for _ in range(2):
        weights.run_on_driver(lambda: None)
    return len(weights.take_reports())


@pytest.mark.parametrize(("keeps_weights", "pushes"), [(True, 0), (False, 2)])
def test_servers_that_have_released_their_weights_get_them_first(
    keeps_weights: bool, pushes: int
) -> None:
    assert launch(2, works_twice, keeps_weights) == [pushes] * 2


def refits_twice() -> Any:
    weights = pusher()

    def work() -> str:
        weights.refit()
        weights.refit()
        return "done"

    first = weights.run_on_driver(work)
    return first, weights.run_on_driver(lambda: "again"), len(weights.take_reports())


def pushes(*errors: WeightSyncError) -> Any:
    weights = pusher(*errors)
    try:
        weights.push()
    except WeightSyncError as error:
        return str(error)
    return weights._sync.without


def test_every_rank_takes_part_in_the_pushes_that_the_driver_requests() -> None:
    assert launch(2, refits_twice) == [("done", "again", 2), (None, None, 2)]


A_DIES, B_DIES = ServersFailed("died", ["a"], left=1), ServersFailed("died", ["b"], left=1)
ALL_DIE = ServersFailed("died", ["c"])


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ((), [set()]),
        ((A_DIES, B_DIES), [set(), {"a"}, {"a", "b"}]),
        ((A_DIES, ALL_DIE), [set(), {"a"}, set()]),
        ((TrainerFault("the disk is full"),), "the disk is full"),
    ],
)
def test_a_push_in_which_the_servers_fail_is_made_again(
    errors: tuple[WeightSyncError, ...], outcome: Any
) -> None:
    """It is made to the others, and to all that recover if there are none."""
    assert launch(2, pushes, *errors) == [outcome] * 2


def pushed_once_a_step() -> int:
    weights = pusher()
    weights.push()
    weights.push_if_changed()
    weights._state.step += 1
    weights.push_if_changed()
    return len(weights._sync.without)


def test_weights_that_the_servers_have_are_not_pushed_again() -> None:
    assert launch(1, pushed_once_a_step) == [2]

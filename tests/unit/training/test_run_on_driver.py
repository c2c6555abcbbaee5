"""What the driver does alone, and the pushes that it may ask all ranks for meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.state import State
from megavlm.training.base_trainer import BaseTrainer
from megavlm.weight_sync.sync import SyncReport
from tests.distributed.fork import launch


class ServerPool:
    """Servers of which some die in the pushes or fail them."""

    def __init__(self, setbacks: int) -> None:
        self.setbacks = setbacks
        self.waited = 0

    def wait_while(self, *states: State) -> None:
        pass

    def wait_for_targets(self) -> int:
        self.waited += 1
        return 0

    def failed_since(self, count: int) -> bool:
        return self.setbacks > count


class Sync:
    """Fails on every rank as often as it is told, as a push does."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.pushes = 0

    def update_weights(self, step: int) -> SyncReport:
        dist.barrier()  # a push is collective
        self.pushes += 1
        if self.pushes <= self.failures:
            raise WeightSyncError("the server has died")
        return SyncReport(seconds=0.1, bytes=7, tensors=2, checked=3, servers=1)


def loop_of(setbacks: int, failures: int) -> Any:
    loop: Any = BaseTrainer.__new__(BaseTrainer)
    loop.train_state = SimpleNamespace(step=3, mesh=SimpleNamespace(objects=None))
    is_driver = dist.get_rank() == 0
    loop.driver = SimpleNamespace(server_pool=ServerPool(setbacks)) if is_driver else None
    loop.sync, loop.sharing, loop.pushes = Sync(failures), None, []
    return loop


def refits_twice() -> Any:
    loop = loop_of(0, 0)

    def work() -> str:
        loop.refit()
        loop.refit()
        return "done"

    first = loop.run_on_driver(work)
    return first, loop.run_on_driver(lambda: "again"), loop.sync.pushes


def pushes(setbacks: int, failures: int) -> Any:
    loop = loop_of(setbacks, failures)
    try:
        loop.push()
    except WeightSyncError as error:
        return str(error)
    return loop.sync.pushes


def test_every_rank_takes_part_in_what_the_driver_asks_for() -> None:
    assert launch(2, refits_twice) == [("done", "again", 2), (None, None, 2)]


@pytest.mark.parametrize(
    ("setbacks", "failures", "outcome"),
    [(0, 0, 1), (1, 1, 2), (0, 1, "the server has died")],
)
def test_a_push_in_which_the_servers_fail_is_made_again(
    setbacks: int, failures: int, outcome: Any
) -> None:
    assert launch(2, pushes, setbacks, failures) == [outcome] * 2


def recorded() -> list[Any]:
    """What two steps are recorded with, after two pushes and after none."""
    loop, records = loop_of(0, 0), []
    loop.push()
    loop.push()
    loop.train_state.phases = SimpleNamespace(take=lambda: {"seconds/total": 1.0})
    loop.driver.record = lambda step, metrics, samples: records.append(metrics)
    for _ in range(2):
        loop.record({}, num_tokens=1)
    return records


def test_a_step_tells_what_was_sent_and_compared() -> None:
    ((first, second),) = launch(1, recorded)
    assert (first["sync_bytes"], first["sync_checked"], first["sync_servers"]) == (14, 6, 1)
    assert not [name for name in second if name.startswith("sync")]

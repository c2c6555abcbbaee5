"""Weight pushes: retries, work on the driver alone, and the pushes that it may request."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.state import State
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.weight_push import WeightPusher
from megavlm.weight_sync.update import SyncReport
from tests.distributed.fork import launch


class ServerPool:
    """Servers of which some die in the pushes or fail them."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.waited = 0

    def wait_while(self, *states: State) -> None:
        pass

    def wait_for_receivers(self) -> int:
        self.waited += 1
        return 0

    def failed_since(self, count: int) -> bool:
        return self.failures > count


class Sync:
    """Weight sync that fails on every rank a given number of times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.pushes = 0
        self.version: int | None = None

    def update_weights(self, step: int) -> SyncReport:
        dist.barrier()  # a push is collective
        self.pushes += 1
        if self.pushes <= self.failures:
            raise WeightSyncError("the server has died")
        self.version = step
        return SyncReport(seconds=0.1, bytes=7, tensors=2, checked=3, servers=1)


def pusher(failures: int, failed_pushes: int) -> Any:
    """A pusher whose pool counts `failures` and whose first `failed_pushes` fail."""
    is_driver = dist.get_rank() == 0
    mesh = SimpleNamespace(objects=None, is_driver=is_driver)
    state: Any = SimpleNamespace(step=3, mesh=mesh)
    server_pool: Any = ServerPool(failures) if is_driver else None
    sync: Any = Sync(failed_pushes)
    return WeightPusher(state, sync, server_pool, None)


def refits_twice() -> Any:
    weights = pusher(0, 0)

    def work() -> str:
        weights.refit()
        weights.refit()
        return "done"

    first = weights.run_on_driver(work)
    return first, weights.run_on_driver(lambda: "again"), len(weights.take_reports())


def pushes(failures: int, failed_pushes: int) -> Any:
    weights = pusher(failures, failed_pushes)
    try:
        weights.push()
    except WeightSyncError as error:
        return str(error)
    return weights._sync.pushes


def test_every_rank_takes_part_in_the_pushes_that_the_driver_requests() -> None:
    assert launch(2, refits_twice) == [("done", "again", 2), (None, None, 2)]


@pytest.mark.parametrize(
    ("failures", "failed_pushes", "outcome"),
    [(0, 0, 1), (1, 1, 2), (0, 1, "the server has died")],
)
def test_a_push_in_which_the_servers_fail_is_made_again(
    failures: int, failed_pushes: int, outcome: Any
) -> None:
    assert launch(2, pushes, failures, failed_pushes) == [outcome] * 2


def pushed_once_a_step() -> int:
    weights = pusher(0, 0)
    weights.push()
    weights.push_if_changed()
    weights._state.step += 1
    weights.push_if_changed()
    return int(weights._sync.pushes)


def test_weights_that_the_servers_have_are_not_pushed_again() -> None:
    assert launch(1, pushed_once_a_step) == [2]


def recorded() -> list[Any]:
    """Metrics of two steps, after two pushes and after none."""
    trainer, records = BaseTrainer.__new__(BaseTrainer), []
    trainer.weights = pusher(0, 0)
    trainer.weights.push()
    trainer.weights.push()
    trainer.train_state = SimpleNamespace(  # type: ignore[assignment]
        step=3,
        config=SimpleNamespace(algorithm=None, lora=SimpleNamespace(rank=0)),
        phases=SimpleNamespace(take=lambda: {"seconds/total": 1.0}),
    )
    trainer.driver = SimpleNamespace(  # type: ignore[assignment]
        record=lambda step, metrics, samples: records.append(metrics),
        utilization=lambda passes, seconds: {"passes": sum(passes.values())},
    )
    trainer.passes = Counter(reference=1.0)  # of the first step alone
    for _ in range(2):
        trainer.record({}, num_tokens=1)
    return records


def test_metrics_of_a_step_count_what_was_sent_and_compared() -> None:
    ((first, second),) = launch(1, recorded)
    assert (first["sync_bytes"], first["sync_checked"], first["sync_servers"]) == (14, 6, 1)
    assert not [name for name in second if name.startswith("sync")]
    assert first["passes"] == 1.0 + second["passes"]

"""Pushes in which servers fail: the others go on, no version advances at one that missed something,
and the next push heals it.
"""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.mapping import same
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import UPDATE, FakeEngine, GlooEngine
from tests.fakes.receivers import FixedReceivers, push
from tests.support.fork import launch
from tests.support.timeouts import scaled

NAMES = [f"language_model.decoder.layers.{i}.w" for i in range(4)] + ["visual.w"]
ENTRIES = [same(name, f"hub.{name}", (6,)) for name in NAMES]
HF = {entry.hf[0]: torch.full((6,), float(i)) for i, entry in enumerate(ENTRIES)}
TRAINED = list(HF)[:4]
SHAPES = [{name: (6,) for name in HF}]


class Model(torch.nn.Module):
    """What each rank holds, the tower frozen; every number grows with the version."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {}
        for index, entry in enumerate(ENTRIES):
            parameter = torch.nn.Parameter(HF[entry.hf[0]].clone(), index != 4)
            self.held[entry.megatron] = parameter
            self.register_parameter(str(index), parameter)

    def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        return {k: ShardedTensor.from_rank_offsets(k, x) for k, x in self.held.items()}


@dataclass
class Recorder(FixedReceivers):
    """Receivers that remember what they were told; `floor`: servers that must be left."""

    given: Sequence[Receiver]
    floor: int = 0
    told: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.given)

    def refitted(self, url: str, version: str) -> None:
        super().refitted(url, version)
        self.told.append((url, version))

    def failed(self, url: str, reason: str) -> None:
        super().failed(url, reason)
        self.told.append((url, "failed"))
        if sum(what == "failed" for _, what in self.told) > len(self.given) - self.floor:
            raise RolloutServerError("fewer servers than rollout.min_servers are left")


def transport(kind: str) -> Transport:
    return (TensorTransport if kind == "tensor" else DistributedTransport)(timeout=scaled(30))


def pushes(
    urls: Sequence[str],
    versions: Sequence[int],
    kind: str = "tensor",
    floor: int = 0,
    between: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """On each rank. Buckets of one tensor. `between`: ends and starts the first server,
    after the first push.
    """
    trainer = TrainerRanks(Layout(), dist.get_world_size(), (0,) * 4)
    plan = SyncPlan(ENTRIES, trainer, frozenset(range(4)))
    model = Model()
    receivers = Recorder([Receiver(url, 1, "cpu", needs_all=False) for url in urls], floor)
    sync = WeightSync(
        plan,
        [model],  # type: ignore[list-item]
        transport(kind),
        SyncSettings(torch.float32, timeout=scaled(30), bucket_bytes=24),
        receivers=receivers if dist.get_rank() == 0 else None,
    )
    outcomes: list[Any] = []
    for version in versions:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 1
        try:
            outcomes.append(push(sync, version).servers)
        except (WeightSyncError, RolloutServerError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        if between is not None and version == versions[0]:
            between()
            receivers.failed(urls[0], "its process ended")  # needs all from now on
    sync.close()
    return {"outcomes": outcomes, "version": sync.version, "told": receivers.told}


def holds(weights: dict[str, torch.Tensor], pushes: int, names: Sequence[str]) -> bool:
    """`names`: what was sent; the rest is as at the server's start."""
    grown = {name: HF[name] + (pushes if name in TRAINED else 0) for name in names}
    return all(
        torch.equal(tensor, grown.get(name, torch.zeros(6))) for name, tensor in weights.items()
    )


def test_the_only_server_fails() -> None:
    """The version stays, the server is stale, and the next push brings it everything."""
    with FakeEngine(SHAPES) as engine:
        engine.refused[UPDATE] = {1}
        first, second = launch(2, pushes, [engine.url], (4, 5))
        assert first["version"] == second["version"] == 5
        for result in (first, second):
            error, servers = result["outcomes"]
            assert "ServersFailed: weight update to version 4 failed" in error and UPDATE in error
            assert servers == 1
        assert first["told"] == [(engine.url, "failed"), (engine.url, "5")]
        assert engine.weight_version == "5" and not engine.is_paused
        assert holds(engine.weights, 2, list(HF)), "what training cannot change, too"


def test_the_push_is_made_again_for_the_other_server() -> None:
    with GlooEngine(SHAPES) as good, FakeEngine(SHAPES) as bad:
        bad.refused[UPDATE] = {1}
        (result,) = launch(1, pushes, [bad.url, good.url], (4,), "tensor")
        assert result["outcomes"] == [1]
        assert sorted(result["told"]) == sorted([(bad.url, "failed"), (good.url, "4")])
        version, weights = good.state()
        assert version == "4" and holds(weights, 1, TRAINED)
        assert bad.weight_version == "3" and not bad.is_paused, "it may be asked for its health"


def test_a_stale_server_gets_all_and_the_other_only_what_changes() -> None:
    with FakeEngine(SHAPES) as fresh, FakeEngine(SHAPES) as stale:
        (result,) = launch(1, heal_one, [fresh.url, stale.url])
        assert result["outcomes"] == [2]
        assert holds(fresh.weights, 1, TRAINED)
        assert holds(stale.weights, 1, list(HF))


def heal_one(urls: Sequence[str]) -> dict[str, Any]:
    plan = SyncPlan(ENTRIES, TrainerRanks(Layout(), 1, (0,) * 4), frozenset(range(4)))
    model = Model()
    for parameter in model.parameters():
        parameter.data += float(parameter.requires_grad)
    receivers = [Receiver(url, 1, "cpu", needs_all=url == urls[1]) for url in urls]
    sync = WeightSync(
        plan,
        [model],  # type: ignore[list-item]
        TensorTransport(timeout=scaled(30)),
        SyncSettings(torch.float32),
        receivers=FixedReceivers(receivers),
    )
    return {"outcomes": [sync.update_weights(4).servers]}


def test_too_few_servers_end_the_run_on_every_rank() -> None:
    with FakeEngine(SHAPES) as good, FakeEngine(SHAPES) as bad:
        bad.refused[UPDATE] = {1}
        results = launch(2, pushes, [bad.url, good.url], (4,), "tensor", 2)
        for result in results:
            assert result["outcomes"][0].startswith("RolloutServerError: fewer servers than")


def test_a_server_that_has_started_anew_is_no_rank_of_the_group_that_it_was_in() -> None:
    pushed, started = multiprocessing.Event(), multiprocessing.Event()

    def between() -> None:
        """On the rank."""
        pushed.set()
        assert started.wait(scaled(180))

    with GlooEngine(SHAPES) as engine, GlooEngine(SHAPES) as other:

        def restart() -> None:
            assert pushed.wait(scaled(180))
            engine.restart()
            started.set()

        thread = threading.Thread(target=restart)
        thread.start()
        arguments = ([engine.url, other.url], (4, 5, 6), "distributed", 0, between)
        (result,) = launch(1, pushes, *arguments)
        thread.join()
        assert result["outcomes"] == [2, 2, 2]
        told = [what for url, what in result["told"] if url == engine.url]
        assert told == ["4", "failed", "5", "6"], "failed as the test says, and in no push"
        for server, names in ((engine, list(HF)), (other, TRAINED)):
            version, weights = server.state()
            assert version == "6" and holds(weights, 3, names)

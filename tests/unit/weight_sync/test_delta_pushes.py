"""Updates that send only changes bring servers to the bytes of whole updates, and only servers that
have the bytes before get them.
"""

import pytest
import torch

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import UPDATE, FakeEngine, GlooEngine
from tests.fakes.receivers import FixedReceivers
from tests.support.fork import launch
from tests.support.timeouts import scaled
from tests.unit.weight_sync.test_slices import (
    HEADS,
    SHAPES,
    Model,
    check_held,
    grown,
    make_plan,
    pushes,
    stored,
)

STEP = 29


@pytest.mark.parametrize(
    ("kind", "stages", "per_node"),
    [("distributed", 2, None), ("tensor", 2, None), ("tensor", 2, 1)],
    ids=["distributed", "tensor", "tensor between nodes"],
)
def test_changes_bring_servers_to_the_new_weights(
    kind: str, stages: int, per_node: int | None
) -> None:
    """The first update sends everything, the second what training changes: both are whole."""
    with GlooEngine(SHAPES) as one, GlooEngine(SHAPES) as other:
        urls = [one.url, other.url]
        results = launch(stages, pushes, urls, range(1, 7), kind, 2048, STEP, per_node)
        for engine in (one, other):
            check_held(engine, "6", 6, STEP)
        for result in results:
            assert result["errors"] == []
            whole, *_ = (report.bytes for report in result["reports"])
            assert [report.density for report in result["reports"][:2]] == [1, 1]
            for report in result["reports"][2:]:
                assert 0 < report.bytes < 0.1 * whole
                assert 0.5 / STEP < report.density * 2 < 2 / STEP, "half of each float32 changes"


def test_after_a_failure_whole_weights_are_sent() -> None:
    with FakeEngine(SHAPES) as engine:
        engine.refused[UPDATE] = {4}
        (result,) = launch(1, pushes, [engine.url], range(1, 9), "tensor", 2048, STEP)
        assert len(result["errors"]) == 1
        is_whole = [report.density == 1 for report in result["reports"]]
        # Updates 1 and 5 send everything, 2 and 6 what training changes, and 3, 7 and 8 changes.
        assert is_whole == [True, True, False, True, True, False, False]
        check_weights(engine, 8)


def check_weights(engine: FakeEngine, pushes: int) -> None:
    for rank, tensors in enumerate(stored(pushes, STEP)):
        for name, tensor in tensors.items():
            assert torch.equal(engine.weights[f"{rank} {name}"], tensor), name


def two_trainers(url: str) -> list[str]:
    """One pushes three times, another once, and the first again, twice."""
    plan = make_plan(1)
    model = Model(plan)

    def sync() -> WeightSync:
        return WeightSync(
            plan,
            [model],  # type: ignore[list-item]
            TensorTransport(timeout=scaled(30)),
            SyncSettings(torch.float32, HEADS, delta=True),
            receivers=FixedReceivers([Receiver(url, 2, "cpu", True)]),
        )

    first, second = sync(), sync()
    outcomes = []
    for version, one in enumerate((first, first, first, second, second, first, first)):
        for parameter in model.parameters():
            grown(parameter.data, 1, STEP)
        try:
            outcomes.append("whole" if one.update_weights(version).density == 1 else "changes")
        except WeightSyncError as error:
            outcomes.append(str(error))
    return outcomes


def test_a_server_with_other_weights_refuses_changes() -> None:
    with FakeEngine(SHAPES) as engine:
        (outcomes,) = launch(1, two_trainers, engine.url)
        assert outcomes[:5] == ["whole", "whole", "changes", "whole", "whole"]
        assert "has not loaded the update before" in outcomes[5]
        assert outcomes[6] == "whole"
        check_weights(engine, 7)

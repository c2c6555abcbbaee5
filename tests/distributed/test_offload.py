"""A trainer whose memory goes to the host between updates trains as one whose memory stays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megavlm.config.optimizer import Optimizer
from megavlm.parallel import offload
from megavlm.parallel.offload import Offloadable, distinct_storages
from megavlm.training.colocate import trainer_memory
from tests.distributed.test_updates import SETTINGS, start
from tests.parity.models import model_folder
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("qwen2_5_vl")


def train(folder: Path, ranks: Ranks, away: bool, settings: Optimizer = SETTINGS) -> Any:
    """Two updates; parameters and gradient norms."""
    run = start(folder, ranks, frozen=True, settings=settings)
    parts = trainer_memory(run.updater)
    norms = []
    for _ in range(2):
        if away:
            for part in parts.values():
                part.to_host()
            held = [
                p.untyped_storage().nbytes() for c in run.updater.chunks for p in c.parameters()
            ]
            assert sum(held) == 0
            states = run.updater.optimizer.chained_optimizers[0].optimizer.state.values()
            assert all(
                x.untyped_storage().nbytes() == 0
                for state in states
                for x in state.values()
                if torch.is_tensor(x)
            )
            for part in reversed(parts.values()):
                part.to_device()
        run.forward_backward(run.features())
        norms.append(run.updater.step()["gradient_norm"])
    return run.parameters(), norms


@pytest.mark.parametrize("layout", ["one rank", "DP2"])
def test_nothing_changes_bit_by_bit(folder: Path, layout: str) -> None:
    ranks = LAYOUTS[layout]
    stayed = launch(ranks.world_size, train, folder, ranks, False)
    went = launch(ranks.world_size, train, folder, ranks, True)
    for (parameters, norms), (others, other_norms) in zip(stayed, went, strict=True):
        assert norms == other_norms and norms[0] > 0
        for one, other in zip(parameters, others, strict=True):
            assert np.array_equal(one, other)


def switches(folder: Path, ranks: Ranks, away: bool) -> tuple[Any, int]:
    """Make two updates, with thirty switches before each. Returns the parameters, and by how many
    bytes the process grew in the last twenty switches.
    """
    run = start(folder, ranks, frozen=True, settings=SETTINGS)
    parts, sizes = trainer_memory(run.updater), []
    for _ in range(2):
        for _ in range(30 * away):
            for part in parts.values():
                part.to_host()
            for part in reversed(parts.values()):
                part.to_device()
            sizes.append(psutil.Process().memory_info().rss)
        run.forward_backward(run.features())
        run.updater.step()
    return run.parameters(), sizes[-1] - sizes[-20] if away else 0


@pytest.mark.slow
def test_sixty_switches_change_nothing_and_take_no_more_memory(folder: Path) -> None:
    ranks = LAYOUTS["DP2"]
    stayed = launch(ranks.world_size, switches, folder, ranks, False)
    went = launch(ranks.world_size, switches, folder, ranks, True)
    for (parameters, _), (others, grown) in zip(stayed, went, strict=True):
        pairs = zip(parameters, others, strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
        assert grown < 2**22, "a model that is left behind at each switch would take 100 MB"


def offloaded(folder: Path, ranks: Ranks) -> Any:
    """The same with the optimizer's state on the host, which is empty on the device between."""
    run = start(folder, ranks, frozen=True, settings=replace(SETTINGS, offload=True))
    norms = []
    for _ in range(2):
        run.forward_backward(run.features())
        assert sum(tensor.untyped_storage().nbytes() for tensor in run.updater.state_tensors()) == 0
        norms.append(run.updater.step()["gradient_norm"])
    with run.updater.state_on_device():
        assert all(tensor.abs().sum() > 0 for tensor in run.updater.state_tensors())
    return run.parameters(), norms


@pytest.mark.parametrize("layout", ["DP2", *slow("PP2")])
def test_updates_with_offloaded_state_are_the_same_bit_by_bit(folder: Path, layout: str) -> None:
    ranks = LAYOUTS[layout]
    stayed = launch(ranks.world_size, train, folder, ranks, False)
    went = launch(ranks.world_size, offloaded, folder, ranks)
    for (parameters, norms), (others, other_norms) in zip(stayed, went, strict=True):
        assert norms == other_norms and norms[0] > 0
        for one, other in zip(parameters, others, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("block", [2**28, 16])
def test_views_share_a_storage_that_leaves_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through blocks of host memory, as the reference's weights: pinned memory is rounded up."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", block)
    whole = torch.arange(6.0)
    views = [whole[:2], whole[2:].view(2, 2)]
    assert len(distinct_storages([whole, *views, torch.empty(0)])) == 1
    part = Offloadable(lambda: [*views, whole])
    part.to_host()
    assert whole.untyped_storage().nbytes() == 0
    part.to_device()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and views[1].tolist() == [[2, 3], [4, 5]]
    views[0].fill_(9)
    assert whole[0] == 9, "still a view of it"


def test_memory_on_the_host_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes longer than copying. State of the optimizer may come later, in more blocks."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    tensors = [torch.arange(12.0), torch.arange(5.0)]
    part = Offloadable(lambda: tensors)
    places = []
    for number in range(4):
        if number == 2:
            tensors.append(torch.arange(20.0))
        part.to_host()
        places.append([block.data_ptr() for block in part._host._blocks])
        part.to_device()
    assert places[0] == places[1] and places[2] == places[3]
    assert (len(places[1]), len(places[2])) == (2, 3) and places[1][0] == places[2][0]
    assert [x.tolist() for x in tensors] == [[*range(n)] for n in (12, 5, 20)]


def test_what_is_not_kept_comes_back_as_room_alone() -> None:
    gradient = torch.ones(4)
    part = Offloadable(lambda: [gradient], keep=False)
    part.to_host()
    part.to_device()
    gradient.zero_()
    assert gradient.tolist() == [0.0] * 4


def test_what_numpy_has_seen_stays_where_it_is() -> None:
    """A push by value and a checkpoint look at parameters on a CPU through numpy."""
    seen = torch.arange(4.0)
    seen.numpy()
    part = Offloadable(lambda: [seen])
    part.to_host()
    part.to_device()
    assert seen.tolist() == [0.0, 1.0, 2.0, 3.0]

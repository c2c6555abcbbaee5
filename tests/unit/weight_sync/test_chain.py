"""A store of weights: a base and changes, from which servers come to the trainer's bytes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from megavlm.inference.errors import TrainerFault, WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.transports import chain
from megavlm.weight_sync.transports.chain import ChainTransport
from megavlm.weight_sync.update import SyncSettings
from tests.fakes.engine import UPDATE, FakeEngine
from tests.fakes.receivers import FixedReceivers
from tests.support.fork import launch
from tests.support.timeouts import scaled
from tests.unit.weight_sync.test_slices import HEADS, SHAPES, Model, grown, make_plan, stored

STEP = 29


class Trainer:
    """This rank's part of a run that writes to a store."""

    def __init__(self, store: Path | str, urls: Sequence[str], run: str = "run") -> None:
        plan = make_plan(dist.get_world_size())
        self.model = Model(plan)
        self.receivers = FixedReceivers([Receiver(url, 2, "cpu", True) for url in urls])
        self.transport = ChainTransport(str(store), run, timeout=scaled(20))
        is_driver = dist.get_rank() == 0
        self.sync = WeightSync(
            plan,
            [self.model],  # type: ignore[list-item]
            self.transport,
            SyncSettings(torch.float32, HEADS, bucket_bytes=2048),
            receivers=self.receivers if is_driver else None,
        )
        self.pushes = 0

    def push(self) -> Any:
        self.pushes += 1
        for parameter in self.model.parameters():
            grown(parameter.data, 1, STEP)
        return self.sync.update_weights(self.pushes)

    def catch_up(self, url: str) -> str | None:
        assert self.sync._coordinator is not None
        return self.sync._coordinator.catch_up(Receiver(url, 2, "cpu", True))


def check(engine: FakeEngine, pushes: int) -> None:
    assert engine.weight_version == str(pushes)
    for rank, tensors in enumerate(stored(pushes, STEP)):
        for name, tensor in tensors.items():
            assert torch.equal(engine.weights[f"{rank} {name}"], tensor), name


def pushes(store: Path, urls: list[str], count: int) -> list[tuple[int, float, int]]:
    trainer = Trainer(store, urls)
    reports = [trainer.push() for _ in range(count)]
    return [(report.bytes, report.density, report.chain_bytes) for report in reports]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_base_and_changes_bring_servers_to_the_new_weights(stages: int, tmp_path: Path) -> None:
    with FakeEngine(SHAPES) as one, FakeEngine(SHAPES, fill=float("nan")) as other:
        reports, *_ = launch(stages, pushes, tmp_path, [one.url, other.url], 5)
        for engine in (one, other):
            check(engine, 5)
    base, *changes = reports
    assert base[1] == 1 and base[2] == base[0]
    for size, density, _ in changes:
        assert 0 < size < 0.1 * base[0] and 0.5 / STEP < density * 2 < 2 / STEP
    assert changes[-1][2] == sum(size for size, *_ in reports)
    assert (tmp_path / "owner.json").exists()


def joins(store: Path, urls: list[str], late: str) -> None:
    trainer = Trainer(store, urls)
    assert trainer.catch_up(late) is None, "there is no chain yet"
    for _ in range(3):
        trainer.push()
    assert trainer.catch_up(late) == "3"
    assert trainer.catch_up(late) == "3", "it has all"


def test_a_server_joins_between_pushes(tmp_path: Path) -> None:
    with FakeEngine(SHAPES) as one, FakeEngine(SHAPES, fill=float("nan")) as late:
        launch(1, joins, tmp_path, [one.url], late.url)
        check(late, 3)
        assert len(late.bodies("/pause_generation")) == 0 and one.paths().count(UPDATE) == 3


def in_memory(url: str) -> list[str]:
    with FakeEngine(SHAPES) as one, FakeEngine(SHAPES, fill=float("nan")) as late:
        for run in range(2):  # the second resumes
            trainer = Trainer(url, [one.url])
            trainer.push()
            trainer.push()
            assert trainer.catch_up(late.url) == "2"
            check(one, 2)
            check(late, 2)
            if run:
                trainer.sync.close()
        left: list[str] = fsspec.filesystem("memory").find("/")
        return left


def test_the_store_may_have_no_folders() -> None:
    """An object store, here one in memory, has only names and contents."""
    assert launch(1, in_memory, "memory://bucket/run") == [[]]


def full_chain(store: Path, urls: list[str], links: int) -> list[list[str]]:
    chain.MOST_LINKS = links  # type: ignore[misc]
    trainer = Trainer(store, urls)
    folders = []
    for _ in range(8):
        trainer.push()
        folders.append(sorted(path.name for path in store.iterdir() if path.name != "answers"))
    trainer.sync.close()
    return folders


def test_a_chain_is_bounded_and_cleaned_up(tmp_path: Path) -> None:
    with FakeEngine(SHAPES) as one:
        (folders,) = launch(1, full_chain, tmp_path, [one.url], 2)
        check(one, 8)
    assert max(map(len, folders)) <= 1 + 2 * 3, "two chains of a base and two links, and the owner"
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_begins_a_new_base_and_another_run_is_refused(tmp_path: Path) -> None:
    with FakeEngine(SHAPES) as one:
        launch(1, pushes, tmp_path, [one.url], 2)
        left = [path.name for path in tmp_path.iterdir()]
        (again,) = launch(1, pushes, tmp_path, [one.url], 1)
        assert again[0][1] == 1 and not {*left} - {"owner.json", "answers"} & {
            path.name for path in tmp_path.iterdir()
        } - {"owner.json", "answers"}
        check(one, 1)
        (tmp_path / "owner.json").write_text(json.dumps({"run": "other"}))
        with pytest.raises(Exception, match=r"is used by the run in other: choose another"):
            launch(1, pushes, tmp_path, [one.url], 1)
        (tmp_path / "thesis.txt").write_text("not the run's")
        with pytest.raises(Exception, match=r"holds thesis.txt, but a store has only what a run"):
            launch(1, pushes, tmp_path, [one.url], 1)
        assert (tmp_path / "thesis.txt").exists()


def test_of_two_runs_one_takes_a_store(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    first, second = (ChainTransport(url, run, timeout=1) for run in ("first", "second"))
    second._fs = LocalFileSystem(skip_instance_cache=True)
    second._fs.exists = lambda path: False  # at the moment before the first creates it
    first._own()
    with pytest.raises(TrainerFault, match="is used by the run in first: choose another"):
        second._own()
    second.close()
    first._own()
    (tmp_path / "store/owner.json").write_text("")
    with pytest.raises(TrainerFault, match="is used by the run in another folder"):
        first._own()
    first.close()
    assert (tmp_path / "store/owner.json").exists(), "it is the other run's"


def faulty(store: Path, urls: list[str], late: str, kind: str) -> list[Any]:
    trainer = Trainer(store, urls)
    trainer.push()
    trainer.push()
    link = next(path for path in store.iterdir() if (path / "0.json").exists() and is_delta(path))
    victim = link / "0.1"
    if kind == "lost":
        victim.unlink()
    elif kind == "corrupted":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif kind == "torn":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        shutil.rmtree(store)
        store.write_text("no folder")
    outcomes: list[Any] = []
    for work in (lambda: trainer.catch_up(late), trainer.push, lambda: trainer.catch_up(late)):
        try:
            done = work()
            outcomes.append(getattr(done, "density", done))
        except WeightSyncError as error:
            outcomes.append(str(error))
    return outcomes


def is_delta(link: Path) -> bool:
    return json.loads((link / "0.json").read_text())["parent"] is not None


@pytest.mark.parametrize("kind", ["lost", "corrupted", "torn", "gone"])
def test_a_damaged_chain_is_loaded_by_nobody_and_replaced(kind: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with FakeEngine(SHAPES) as one, FakeEngine(SHAPES) as late:
        (outcomes,) = launch(1, faulty, store, [one.url], late.url, kind)
        if kind == "gone":
            assert "did not load weights" in outcomes[0] or "cannot be" in outcomes[0]
            assert "rollout.store" in outcomes[1] and "cannot be used" in outcomes[1]
            assert outcomes[2] is None
            assert late.weight_version != "3" and one.weight_version == "2"
            return
        assert "damaged" in outcomes[0] or "FileNotFound" in outcomes[0]
        assert outcomes[1:] == [1.0, "3"], "a new base, from which it joins"
        check(one, 3)
        check(late, 3)

"""Which steps stay, on folders that hold nothing but manifests."""

import logging
import math
import random
from pathlib import Path

import pytest

from megavlm.checkpointing import atomic
from megavlm.checkpointing.folder import Manifest, complete_steps, latest_step, step_folder
from megavlm.checkpointing.retention import Retention, prune


def save(
    folder: Path, step: int, score: float | None = None, retention: Retention | None = None
) -> None:
    """A step as a save leaves it."""
    path = atomic.partial_path(step_folder(folder, step))
    path.mkdir()
    scores = {} if score is None else {"reward": score}
    Manifest(step, True, {}, {}, scores).write(path)
    atomic.replace_folder(step_folder(folder, step))
    atomic.write_text(folder / "latest", f"{step_folder(folder, step).name}\n")
    prune(folder, step, retention or Retention())


def best(folder: Path) -> str:
    return (folder / "best").read_text()


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [10, 20, 30, 40, 50, 60]),
        (Retention(last=1), [60]),
        (Retention(last=3), [40, 50, 60]),
        (Retention(last=9), [10, 20, 30, 40, 50, 60]),
        (Retention(last=1, every=30), [30, 60]),
        (Retention(last=2, every=20), [20, 40, 50, 60]),
        (Retention(last=1, metric="reward"), [20, 60]),
        (Retention(last=1, metric="reward", higher_is_better=False), [30, 60]),
        (Retention(last=2, every=50, metric="reward"), [20, 50, 60]),
        (Retention(last=1, metric="accuracy"), [60]),  # was not measured
    ],
)
def test_the_exact_set(tmp_path: Path, retention: Retention, kept: list[int]) -> None:
    scores = {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.9, 50: math.nan, 60: None}
    for step, score in scores.items():
        save(tmp_path, step, score, retention)
        assert latest_step(tmp_path) == step
        assert step in complete_steps(tmp_path)
    assert complete_steps(tmp_path) == kept
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        step_folder(tmp_path, step).name for step in kept
    ], "nothing half-deleted"


def test_the_best_is_named_and_known_to_a_resumed_run(tmp_path: Path) -> None:
    """It is read from the manifests; the file is for people."""
    retention = Retention(last=1, metric="reward")
    save(tmp_path, 1, 0.7, retention)
    save(tmp_path, 2, 0.3, retention)
    assert best(tmp_path) == "step_00000001\n"
    (tmp_path / "best").write_text("garbage")
    save(tmp_path, 3, 0.6, retention)
    assert best(tmp_path) == "step_00000001\n" and complete_steps(tmp_path) == [1, 3]
    save(tmp_path, 4, 0.8, retention)
    assert best(tmp_path) == "step_00000004\n" and complete_steps(tmp_path) == [4]


def test_a_run_that_went_back_leaves_later_steps_alone(tmp_path: Path) -> None:
    """Their scores do not count either, until they are reached again."""
    for step, score in ((1, 0.1), (2, 0.2), (3, 0.9), (4, 0.4)):
        save(tmp_path, step, score)
    retention = Retention(last=1, metric="reward")
    save(tmp_path, 2, 0.3, retention)
    assert complete_steps(tmp_path) == [2, 3, 4] and latest_step(tmp_path) == 2
    assert best(tmp_path) == "step_00000002\n"
    save(tmp_path, 3, 0.2, retention)
    assert complete_steps(tmp_path) == [2, 3, 4] and best(tmp_path) == "step_00000002\n"
    save(tmp_path, 4, 0.2, retention)
    assert complete_steps(tmp_path) == [2, 4]


def test_the_newest_stays_whatever_is_asked_for() -> None:
    draw = random.Random(0)
    for _ in range(500):
        steps = draw.sample(range(100), draw.randint(1, 8))
        scores = {step: {"x": draw.choice((0.0, 1.0, math.nan))} for step in steps}
        last, every = draw.choice((None, 1, 2, 5)), draw.choice((None, 3, 10))
        retention = Retention(last, every, draw.choice((None, "x")), draw.random() < 0.5)
        found = retention.best(scores)
        kept = retention.kept(steps, found)
        assert max(steps) in kept and kept <= set(steps)
        assert found is None or found in kept
        assert last is not None or kept == set(steps)
        assert len(kept) >= min(last or 0, len(steps))


def test_what_is_damaged_or_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 0.9)
    save(tmp_path, 2, 0.1)
    (step_folder(tmp_path, 1) / "manifest.json").write_text("{")
    save(tmp_path, 3, 0.0, Retention(metric="reward"))
    assert best(tmp_path) == "step_00000002\n"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "step_00000001/manifest.json cannot be read" in caplog.text

    def busy(target: Path) -> None:
        raise OSError("Device or resource busy")

    monkeypatch.setattr(atomic, "remove_folder", busy)
    caplog.clear()
    save(tmp_path, 4, None, Retention(last=2))
    assert complete_steps(tmp_path) == [1, 2, 3, 4] and latest_step(tmp_path) == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"{step_folder(tmp_path, step)} could not be deleted: Device or resource busy."
        for step in (1, 2)
    ]

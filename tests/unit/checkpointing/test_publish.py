"""Which step a run goes on from when it is killed while one appears; on folders of manifests."""

from pathlib import Path

import pytest

from megavlm.checkpointing import atomic
from megavlm.checkpointing.folder import (
    LATEST,
    Manifest,
    complete_steps,
    latest_step,
    publish,
    step_folder,
)

# What a publication does, in order.
ANNOUNCE, RENAME, TRACK, DONE = range(4)


class Killed(BaseException):
    pass


def save(folder: Path, step: int, score: float = 0.0, *, killed_before: int = DONE) -> None:
    path = atomic.partial_path(step_folder(folder, step))
    path.mkdir()
    Manifest(step, True, {}, {}, {"reward": score}).write(path)
    with pytest.MonkeyPatch.context() as patch:
        kill = {
            ANNOUNCE: ("write_text", 0),
            RENAME: ("replace_folder", 0),
            TRACK: ("write_text", 1),
        }
        if killed_before == DONE:
            publish(folder, step)
            return
        name, others = kill[killed_before]
        function, calls = getattr(atomic, name), iter(range(others))

        def killed(*args: object) -> None:
            if next(calls, None) is None:
                raise Killed
            function(*args)

        patch.setattr(atomic, name, killed)
        with pytest.raises(Killed):
            publish(folder, step)
    if path.exists():  # as the next save does
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize(
    ("killed_before", "step"), [(ANNOUNCE, 40), (RENAME, 40), (TRACK, 50), (DONE, 50)]
)
def test_a_step_is_the_latest_once_it_is_there(
    folder: Path, killed_before: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 50, killed_before=killed_before)
    assert latest_step(folder) == step == complete_steps(folder)[-1]
    save(folder, 60, killed_before=RENAME)
    assert latest_step(folder) == step
    save(folder, 60, killed_before=TRACK)
    assert latest_step(folder) == 60
    save(folder, 70)
    assert latest_step(folder) == 70 and (folder / LATEST).read_text() == "step_00000070\n"
    assert not caplog.records


def test_steps_that_a_run_which_went_back_has_left_do_not_win(folder: Path) -> None:
    """It went on from step 20; 30 and 40 are the old ones until it reaches them again."""
    save(folder, 30, 1.0, killed_before=RENAME)
    assert latest_step(folder) == 40  # nothing of the new branch is there yet
    save(folder, 30, 1.0, killed_before=TRACK)
    assert latest_step(folder) == 30
    save(folder, 35, 1.0)
    assert latest_step(folder) == 35
    for killed_before in (ANNOUNCE, RENAME):
        save(folder, 40, 1.0, killed_before=killed_before)
        assert latest_step(folder) == 35 and complete_steps(folder)[-1] == 40
    save(folder, 40, 1.0, killed_before=TRACK)
    assert latest_step(folder) == 40


def test_who_writes_the_tracker_by_hand_is_obeyed(folder: Path) -> None:
    save(folder, 50, killed_before=TRACK)
    (folder / LATEST).write_text("step_00000020\n")
    assert latest_step(folder) == 20


def test_the_first_step_needs_no_announcement(tmp_path: Path) -> None:
    save(tmp_path, 10, killed_before=ANNOUNCE)  # here the first thing written is the last
    assert latest_step(tmp_path) == 10

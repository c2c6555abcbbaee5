"""Records that cannot be written do not end training."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.observability.metrics import METRICS_FILE
from megavlm.observability.progress import Progress
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER
from megavlm.training.recorder import SKIPPED_FILE, Recorder
from tests.support.timeouts import scaled

# TensorBoard's thread ends with its error.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

FULL = "/dev/full"  # ENOSPC upon each write
METRICS = {"loss": 1.0, "seconds/total": 1.0}
GROUP = {"category": "red", "images": [], "responses": []}


@contextmanager
def recorder(path: Path) -> Iterator[Recorder]:
    config = load(path, ["checkpoint.best_metric=loss"])
    before = {*threading.enumerate()}
    made = Recorder(config, Progress(), step=0)
    yield made
    made.close()
    # TensorBoard's thread reports its error as it ends, which must be within this test.
    for thread in {*threading.enumerate()} - before:
        thread.join(scaled(10))


def full_files(run: Path) -> list[Path]:
    (run / SAMPLES_FOLDER).mkdir(exist_ok=True)
    files = [run / METRICS_FILE, run / SAMPLES_FOLDER / SAMPLES_FILE]
    for file in files:
        file.symlink_to(FULL)
    return files


def fill_tensorboard(run: Path) -> Path:
    """Put a full disk under the event file, which is opened for each write."""
    (events,) = (run / "tensorboard").iterdir()
    link = run / "full"
    link.symlink_to(FULL)
    return link.replace(events)  # at once: a thread may write, and would make the file again


def test_the_rows_of_a_step_whose_update_was_skipped_are_written(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    with recorder(write_recipe()) as records:
        for step, skipped in ((1, 0.0), (2, 1.0)):
            rows = [f"rows.parquet:{step}", "rows.parquet:9"]
            records.record_step(step, METRICS | {"skipped_updates": skipped}, [GROUP], rows)
    (line,) = (tmp_path / "run" / SKIPPED_FILE).read_text().splitlines()
    assert json.loads(line) == {"step": 2, "rows": ["rows.parquet:2", "rows.parquet:9"]}


def test_a_full_disk_is_logged_once_and_counted(
    write_recipe: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recorder(write_recipe()) as records:
        fill_tensorboard(tmp_path / "run")
        files = full_files(tmp_path / "run")
        for step in (1, 2):
            records.record_step(step, dict(METRICS), [GROUP])
        assert [record.message.split(" (")[0] for record in caplog.records] == [
            "metrics cannot be written",
            "samples cannot be written",
        ]
        for file in files:
            file.unlink()
        for step in (3, 4):  # there is space again; TensorBoard's thread has ended
            records.record_step(step, dict(METRICS), [GROUP])
    records = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).open()]
    assert [record["step"] for record in records] == [3, 4]
    assert records[0]["recording_failures"] >= 4


def test_tensorboard_alone_may_fail(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    with recorder(write_recipe()) as records:
        full = fill_tensorboard(tmp_path / "run")
        for step in range(1, 5):
            records.record_step(step, dict(METRICS), [])
        assert records._progress.failures >= 1
    assert len((tmp_path / "run" / METRICS_FILE).read_text().splitlines()) == 4
    others = [path for path in (tmp_path / "run/tensorboard").iterdir() if path != full]
    assert len(others) == 1 and others[0].stat().st_size > 100, "another file took its place"


def test_a_torn_record_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megavlm.observability import records

    path = tmp_path / "records.jsonl"
    records.append_record(path, {"step": 1})

    class Tearing:
        """A file of a disk that is full after three bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.written = file, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "Tearing":
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            if self.written:
                raise OSError(errno.ENOSPC, "full")
            self.written = 3
            return int(self.file.write(data[:3]))

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda *args, **kw: Tearing(opened(*args, **kw)))
    with pytest.raises(OSError, match="full"):
        records.append_record(path, {"step": 2})
    monkeypatch.undo()
    records.append_record(path, {"step": 3})
    assert records.read_records(path) == [{"step": 1}, {"step": 3}]


def test_a_closed_output_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        progress = Progress(output)
        for _ in range(3):
            progress.line("a step")
    assert progress.failures == 1 and len(caplog.records) == 1
    assert "the output cannot be written (" in caplog.text

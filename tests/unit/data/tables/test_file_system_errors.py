"""A file system that fails costs no row: reads are tried again, and at last the run ends."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.data.loader import Prompts, SkippedRow
from megavlm.data.media.image_sources import DataFolder
from megavlm.data.tables import files
from megavlm.data.tables.files import DataFile, read_safely
from megavlm.data.tables.formats import LinesTable, ParquetTable


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(files.time, "sleep", slept.append)
    return slept


def failing(number: int, times: int, result: str = "content") -> Callable[[], str]:
    left = [times]

    def read() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return result

    return read


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_read_is_tried_again(number: int, pauses: list[float]) -> None:
    assert read_safely("a.parquet", failing(number, 3)) == "content"
    assert pauses == [1.0, 5.0, 30.0]


def test_an_error_that_stays_is_one_of_input_and_output() -> None:
    with pytest.raises(OSError, match=r"a.parquet, tried 4 times \(Stale file handle\)") as raised:
        read_safely("a.parquet", failing(errno.ESTALE, 4))
    assert raised.value.errno == errno.ESTALE


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_another_error_is_the_data_s(number: int, pauses: list[float]) -> None:
    with pytest.raises(ValueError, match=r"a.parquet \("):
        read_safely("a.parquet", failing(number, 1))
    assert pauses == []


def test_no_row_is_skipped_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader skips rows whose image is missing, and no row whose file system is."""
    (tmp_path / "a.png").write_bytes(b"image")
    folder = DataFolder(str(tmp_path))
    names = ["a.png", "b.png"]
    prompts = Prompts(names, folder.read, "pixels")  # type: ignore[arg-type]
    assert prompts[0] == b"image" and isinstance(prompts[1], SkippedRow)
    monkeypatch.setattr(Path, "read_bytes", lambda path: failing(errno.EIO, 9)())
    with pytest.raises(OSError, match=r"no image at 'a\.png'"):
        prompts[0]


def test_tables_open_a_stale_file_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = pa.table({"problem": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"problem": "a"}\n')
    opened, open_file = [], DataFile.open

    def open_stale(file: DataFile):
        opened.append(file.suffix)
        stream = open_file(file)
        if opened.count(file.suffix) == 2:  # the first read after the table was made
            failing(errno.ESTALE, 1)()
        return stream

    monkeypatch.setattr(DataFile, "open", open_stale)
    made = [
        kind(DataFile(str(tmp_path / name), 0, "a"))
        for kind, name in ((ParquetTable, "a.parquet"), (LinesTable, "a.jsonl"))
    ]
    made[0]._reader = None
    for one in made:
        assert one.read(0, None).record(0) == {"problem": "a"}
    assert opened.count(".parquet") == 3 and opened.count(".jsonl") == 3

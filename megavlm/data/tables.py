"""Tables of records that are read block by block: a Parquet row group, a run of JSONL lines.

No thread of Arrow's gets a Python file: one that lets go of it while the interpreter shuts down
aborts the process (https://github.com/apache/arrow/issues/34314). So Parquet is read by no thread
(`use_threads`, `pre_buffer`), and CSV from a copy in Arrow's memory.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from megavlm.data import git_lfs
from megavlm.data.files import DataFile, read_safely

# A block of JSONL ends at the first of these.
BLOCK_LINES = 256
BLOCK_BYTES = 2**24


class RecordTable(Protocol):
    """A file of records, read in blocks. A table may be used after a fork."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Names of the columns; None for JSONL, where each record has its own keys."""

    @property
    def block_rows(self) -> Sequence[int]: ...

    @property
    def block_bytes(self) -> Sequence[int]:
        """Approximate size of each block in memory."""

    def read(self, block: int, columns: Sequence[str] | None) -> "RecordBlock":
        """Read a block. Only `columns` are read, where the format allows it.

        Raises ValueError for content that cannot be read.
        """


class RecordBlock(Protocol):
    """Consecutive records of a table, in memory."""

    def record(self, index: int) -> dict[str, Any]:
        """Return one record. Raises ValueError if it cannot be parsed."""


def open_table(file: DataFile, texts: Sequence[str] = ()) -> RecordTable:
    """Open a data file and find its rows. `texts` are columns of a CSV file that stay text; other
    columns are converted to numbers where they look like numbers.

    Raises ValueError for a file that is not of the format of its suffix.
    """
    with file.open() as stream:
        if git_lfs.is_pointer(stream.read(64)):
            raise ValueError(f"{file.url}: {git_lfs.FETCH}")
    if file.suffix == ".csv":
        return CsvTable(file, texts)
    return ParquetTable(file) if file.suffix == ".parquet" else LinesTable(file)


class ParquetTable:
    """A Parquet file. Its row groups are the blocks; only the columns asked for are read."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._reader: tuple[int, pq.ParquetFile] | None = None
        metadata = self._open().metadata
        self.columns: Sequence[str] = self._open().schema_arrow.names
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        self.block_rows = [group.num_rows for group in groups]
        self.block_bytes = [group.total_byte_size for group in groups]

    def read(self, block: int, columns: Sequence[str] | None) -> "ArrowBlock":
        wanted = None if columns is None else [c for c in columns if c in self.columns]
        what = f"{self._file.url}: row group {block} is broken"

        def read() -> pa.Table:
            try:
                return self._open().read_row_group(block, columns=wanted, use_threads=False)
            except OSError:
                self._reader = None  # a stale handle stays stale
                raise

        try:
            return ArrowBlock(read_safely(what, read))
        except pa.ArrowException as error:
            raise ValueError(f"{what} ({error})") from error

    def _open(self) -> pq.ParquetFile:
        if self._reader is None or self._reader[0] != os.getpid():
            what = f"{self._file.url}: not a readable Parquet file"
            try:
                reader = read_safely(
                    what, lambda: pq.ParquetFile(self._file.open(), pre_buffer=False)
                )
            except pa.ArrowException as error:
                raise ValueError(f"{what} ({error})") from error
            self._reader = os.getpid(), reader
        return self._reader[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


class CsvTable:
    """A CSV file with a header line, as one block: such files name images and hold none."""

    def __init__(self, file: DataFile, texts: Sequence[str]) -> None:
        options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
        content = pa.BufferOutputStream()
        try:
            with file.open() as stream:
                content.write(stream.read())
            reader = pa.BufferReader(content.getvalue())
            self._table = pyarrow.csv.read_csv(reader, convert_options=options)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file.url}: not a readable CSV file ({error})") from error
        self.columns: Sequence[str] = self._table.schema.names
        self.block_rows = [self._table.num_rows]
        self.block_bytes = [self._table.nbytes]

    def read(self, block: int, columns: Sequence[str] | None) -> "ArrowBlock":
        return ArrowBlock(self._table)


class ArrowBlock:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def record(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


class LinesTable:
    """A JSONL file: one JSON object per line. Empty lines are skipped."""

    columns = None

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._starts = [0]  # of each block, and the end
        self.block_rows: list[int] = []
        with file.open() as stream:
            rows, position = 0, 0
            for line in stream:
                rows += bool(line.strip())
                position += len(line)
                if rows == BLOCK_LINES or (rows and position - self._starts[-1] >= BLOCK_BYTES):
                    self._end_block(rows, position)
                    rows = 0
            if rows:
                self._end_block(rows, position)
        bounds = zip(self._starts, self._starts[1:], strict=False)
        self.block_bytes = [end - start for start, end in bounds]

    def read(self, block: int, columns: Sequence[str] | None) -> "LinesBlock":
        def read() -> bytes:
            with self._file.open() as stream:
                stream.seek(self._starts[block])
                return _read_exactly(stream, self.block_bytes[block])

        content = read_safely(f"{self._file.url}: cannot be read", read)
        return LinesBlock([line for line in content.split(b"\n") if line.strip()])

    def _end_block(self, rows: int, position: int) -> None:
        self.block_rows.append(rows)
        self._starts.append(position)


class LinesBlock:
    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines

    def record(self, index: int) -> dict[str, Any]:
        line = self._lines[index]
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if b"\\ud" in line or b"\\uD" in line:
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the line has half a surrogate pair, {error.object[error.start]!a}, which is no "
                "character: remove it"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the line is not JSON ({error})") from error
        if not isinstance(record, Mapping):
            raise ValueError("the line is not a JSON object")
        return dict(record)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

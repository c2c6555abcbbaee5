"""Tables of records that are read block by block. A block is a Parquet row group, or a run of JSONL
lines.

Arrow's threads must not hold a Python file: a thread that releases it while the interpreter shuts
down aborts the process (https://github.com/apache/arrow/issues/34314). Therefore Parquet is read
without threads (`use_threads`, `pre_buffer`), and CSV from a copy in Arrow's memory.
"""

import codecs
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from decimal import Decimal
from typing import IO, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from megavlm import git_lfs
from megavlm.data.tables.files import DataFile, read_safely

# A block of JSONL ends at the first of these limits.
BLOCK_LINES = 256
BLOCK_BYTES = 2**24
LIST_BYTES = 2**30  # of a JSON list, which is parsed as a whole
_PEEK = 2**16
_CSV_BYTES = 2**31 - 1  # Arrow's limit of a block; a cell cannot be longer


class RecordTable(Protocol):
    """A file of records that is read in blocks. It may be used after a fork."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Names of the columns; None for JSONL, where each record has its own keys."""

    @property
    def block_rows(self) -> Sequence[int]: ...

    @property
    def block_bytes(self) -> Sequence[int]:
        """Approximate size of each block in memory."""

    def read(self, block: int, columns: Sequence[str] | None) -> "RecordBlock":
        """Read a block, and only its `columns` if the format allows it.

        Raises ValueError for content that cannot be read.
        """


class RecordBlock(Protocol):
    """Consecutive records of a table, in memory."""

    fills_nulls: ClassVar[bool]
    """True if a struct has all keys of its column, with null for keys that its record lacks."""

    def record(self, index: int) -> dict[str, Any]:
        """Return one record. Raises ValueError if it cannot be parsed."""

    def line(self, index: int) -> int | None:
        """Return the line of a record in its file, from 1 as editors count; None if its table does
        not consist of lines.
        """


def open_table(file: DataFile, texts: Sequence[str] = ()) -> RecordTable:
    """Open a data file and find its rows.

    texts: Columns of a CSV file that stay text; other columns become numbers if they look like
        numbers.

    Raises ValueError for a file that does not have the format that its suffix says.
    """
    with file.open() as stream:
        if git_lfs.is_pointer(stream.read(64)):
            raise ValueError(f"{file.url}: {git_lfs.FETCH}")
    if file.suffix == ".parquet":
        return ParquetTable(file)
    if file.suffix == ".csv":
        return CsvTable(file, texts)
    if file.suffix == ".json":
        with file.content() as stream:
            if not _begins_lines(stream.read(_PEEK)):
                return ListTable(file)
    return LinesTable(file)


def cell_text(value: object) -> str:
    """Return the text of a column's value, as pandas prints it."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, timedelta):
        hours, seconds = divmod(value.seconds, 3600)
        clock = f"{hours:02}:{seconds // 60:02}:{seconds % 60:02}"
        clock += f".{value.microseconds:06}" * bool(value.microseconds)
        return f"{value.days} days {'+' * (value.days < 0)}{clock}"
    return str(value)


class ParquetTable:
    """A Parquet file. Its row groups are the blocks, and only the requested columns are read."""

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
                self._reader = None  # a stale file handle does not recover: open the file again
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
    """A CSV file with a header line, as one block. Such files are small, because they hold the
    paths of images rather than images.
    """

    def __init__(self, file: DataFile, texts: Sequence[str]) -> None:
        options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
        content = pa.BufferOutputStream()
        try:
            with file.content() as stream:
                content.write(stream.read())
            held = content.getvalue()
            self._table = pyarrow.csv.read_csv(
                pa.BufferReader(held),
                read_options=pyarrow.csv.ReadOptions(block_size=min(held.size + 1, _CSV_BYTES)),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=options,
            )
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file.url}: not a readable CSV file ({error})") from error
        self.columns: Sequence[str] = self._table.schema.names
        self.block_rows = [self._table.num_rows]
        self.block_bytes = [self._table.nbytes]

    def read(self, block: int, columns: Sequence[str] | None) -> "ArrowBlock":
        return ArrowBlock(self._table)


class ArrowBlock:
    fills_nulls: ClassVar[bool] = True

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._narrow = {x.name: x.type for x in table.schema if _is_narrow(x.type)}

    def record(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return record | {name: _as_printed(record[name], t) for name, t in self._narrow.items()}

    def line(self, index: int) -> None:
        return None


def _is_narrow(kind: pa.DataType) -> bool:
    """Return True for a type that holds floats of 32 bits or fewer."""
    if pa.types.is_dictionary(kind):
        return _is_narrow(kind.value_type)
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return kind in (pa.float32(), pa.float16()) or any(map(_is_narrow, inner))


def _as_printed(value: Any, kind: pa.DataType) -> Any:
    """Return a value with narrow floats as they are printed: 0.1 for the float32 nearest to 0.1."""
    if pa.types.is_dictionary(kind):
        return _as_printed(value, kind.value_type)
    if kind in (pa.float32(), pa.float16()) and value is not None:
        return float(str(np.dtype(kind.to_pandas_dtype()).type(value)))
    if isinstance(value, list) and kind.num_fields == 1 and not pa.types.is_map(kind):
        return [_as_printed(item, kind.field(0).type) for item in value]
    if isinstance(value, dict):
        return {x.name: _as_printed(value[x.name], x.type) for x in kind}
    return value


class LinesTable:
    """A JSONL file: one JSON object per line. Empty lines are skipped. Its blocks are ranges of its
    bytes.
    """

    columns = None

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._starts: list[tuple[int, int]] = []  # of each block: its first byte and line
        self.block_rows: list[int] = []
        self.block_bytes: list[int] = []
        start, end, rows = (0, 1), 0, 0
        with self._content() as stream:
            for next_line, line in enumerate(stream, 2):
                end += len(line)
                if not line.strip():
                    continue
                rows += 1
                if rows == BLOCK_LINES or end - start[0] >= BLOCK_BYTES:
                    self._end_block(start, end, rows)
                    start, rows = (end, next_line), 0
        if rows:
            self._end_block(start, end, rows)

    def read(self, block: int, columns: Sequence[str] | None) -> "LinesBlock":
        start, first = self._starts[block]

        def read() -> bytes:
            with self._content() as stream:
                stream.seek(start)
                return _read_exactly(stream, self.block_bytes[block])

        content = read_safely(f"{self._file.url}: cannot be read", read)
        lines = enumerate(content.split(b"\n"), first)
        return LinesBlock([(number, line) for number, line in lines if line.strip()])

    def _content(self) -> AbstractContextManager[IO[bytes]]:
        return self._file.content()

    def _end_block(self, start: tuple[int, int], end: int, rows: int) -> None:
        self._starts.append(start)
        self.block_bytes.append(end - start[0])
        self.block_rows.append(rows)


class ListTable(LinesTable):
    """A JSON file with one list of objects, held in memory as lines."""

    def __init__(self, file: DataFile) -> None:
        with file.content() as stream:
            text = stream.read(LIST_BYTES + 1)
        if len(text) > LIST_BYTES:
            raise ValueError(
                f"{file.url}: a JSON list may have {LIST_BYTES} bytes, as it is read as a whole: "
                "write one object on each line (jq -c '.[]')"
            )
        try:
            records = json.loads(text)
            if not isinstance(records, list):
                raise ValueError("the file is not a list")
            if others := [i for i, record in enumerate(records) if not isinstance(record, dict)]:
                raise ValueError(f"item {others[0]} is not an object")
        except ValueError as error:
            raise ValueError(
                f"{file.url}: not a JSON list of objects, or an object on each line ({error})"
            ) from error
        self._text = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        super().__init__(file)

    def read(self, block: int, columns: Sequence[str] | None) -> "LinesBlock":
        return ListBlock(super().read(block, columns).lines)

    def _content(self) -> AbstractContextManager[IO[bytes]]:
        return io.BytesIO(self._text)


class LinesBlock:
    fills_nulls: ClassVar[bool] = False

    def __init__(self, lines: Sequence[tuple[int, bytes]]) -> None:
        self.lines = lines

    def line(self, index: int) -> int | None:
        return self.lines[index][0]

    def record(self, index: int) -> dict[str, Any]:
        _, line = self.lines[index]
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"the line is not JSON ({error})") from error
        if not isinstance(record, Mapping):
            raise ValueError("the line is not a JSON object")
        return dict(record)


class ListBlock(LinesBlock):
    def line(self, index: int) -> None:
        return None


def _begins_lines(content: bytes) -> bool:
    """Return True if the first bytes of a file begin an object on each line (JSONL)."""
    line, end, _ = content.removeprefix(codecs.BOM_UTF8).strip().partition(b"\n")
    return line.startswith(b"{") and (line.rstrip().endswith(b"}") or not end)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

"""Files of one JSON object per line that survive a kill and a resume, and files written whole."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All records of a file, [] if there is none. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    # Every complete line ends in a newline: what follows the last one is torn, mostly nothing.
    *lines, _torn = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line and hands it to the system at once: a kill loses no finished step."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(record))


def keep_records(path: Path, keep: Callable[[Record], bool]) -> list[Record]:
    """Drops the records that `keep` refuses, and a torn last line; returns what is left."""
    records = [record for record in read_records(path) if keep(record)]
    if path.exists():
        write_records(path, records)
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file by these records."""
    write_whole(path, "".join(map(_line, records)).encode())


def write_whole(path: Path, content: bytes) -> None:
    """The file holds the old content or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def finite(value: Any) -> Any:
    """The value with numbers that JSON has no form for (NaN, infinities) replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"

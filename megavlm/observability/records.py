"""JSON-lines files that survive a kill and a resume."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megavlm.writing import naming, write_whole

Record = dict[str, Any]
SERVERS_FILE = "servers.json"  # states of the rollout servers during a run


def read_records(path: Path) -> list[Record]:
    """Return all records of a file, [] if there is no file.

    A last line that a kill has torn is skipped. Raises ValueError for any other damaged line.
    """
    if not path.exists():
        return []
    # Every complete line ends in a newline: the text after the last newline is torn, if there is
    # any.
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}): delete it, and start again"
            ) from error
    return records


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line and flush it, so that a kill loses no finished step. If the disk is full, the
    file stays as it was, and OSError is raised.
    """
    line = _line(record).encode()
    with naming(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += file.write(line[written:]) or 0
        except OSError:
            with suppress(OSError):  # or the next record would continue the partial line
                file.truncate(size)
            raise


def keep_records(path: Path, keep: Callable[[Record], bool]) -> list[Record]:
    """Delete the records that `keep` rejects, and a torn last line. Return the others."""
    records = [record for record in read_records(path) if keep(record)]
    if path.exists():
        write_records(path, records)
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these records."""
    write_whole(path, "".join(map(_line, records)).encode())


def finite(value: Any) -> Any:
    """Replace NaN and infinities in the value by None, because JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"

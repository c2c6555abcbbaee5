"""Sizes and checksums of the files of a step."""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from megavlm.checkpointing.atomic import close_written

_BLOCK = 1 << 24

Sums = dict[str, int]  # {"bytes": ..., "crc32": ...}


def file_checksums(folder: Path, names: Iterable[str]) -> dict[str, Sums]:
    """Read files and return the size and the CRC-32 of each."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": _crc32(folder / name)}
        for name in names
    }


def first_difference(
    folder: Path, files: Mapping[str, Mapping[str, int]], names: Iterable[str]
) -> str | None:
    """Describe the first of `names` whose size or checksum differs from `files`. Returns None if
    all agree.
    """
    for name in names:
        if problem := size_difference(folder, files, [name]):
            return problem
        if _crc32(folder / name) != files[name]["crc32"]:
            return f"{folder / name} is damaged: its checksum differs from its manifest."
    return None


def size_difference(
    folder: Path, files: Mapping[str, Mapping[str, int]], names: Iterable[str]
) -> str | None:
    """Describe the first of `names` that is missing or whose size differs from `files`. Returns
    None if all agree. The files are not read.
    """
    for name in names:
        path, expected = folder / name, files[name]["bytes"]
        if not path.is_file():
            return f"{path} is missing."
        size = path.stat().st_size
        if size != expected:
            return f"{path} has {size} bytes; its manifest lists {expected}."
    return None


class SummedFile:
    """A new file whose checksum is computed while it is written, so that it does not have to be
    read again. It is flushed to the disk when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.sums: Sums = {"bytes": 0, "crc32": 0}
        self.problem: OSError | None = None  # a full disk, most likely

    def write(self, data: bytes | memoryview) -> int:
        try:
            count = self._file.write(data)
        except OSError as error:
            error.filename = self._file.name
            self.problem = error
            raise
        self.sums["crc32"] = zlib.crc32(data, self.sums["crc32"])
        self.sums["bytes"] += count
        return count

    def flush(self) -> None:
        """Do nothing: torch.save flushes after each tensor, but closing the file flushes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_written(self._file, is_whole=error is None)


def _crc32(path: Path) -> int:
    value = 0
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value

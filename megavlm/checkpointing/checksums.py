"""Sizes and checksums of a step's files: a flipped byte is found, and its file named."""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_BLOCK = 1 << 24


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": _crc32(folder / name)}
        for name in names
    }


def first_difference(
    folder: Path, files: Mapping[str, Mapping[str, int]], names: Iterable[str]
) -> str | None:
    """One sentence about the first of `names` that is not as the manifest says."""
    for name in names:
        path, expected = folder / name, files[name]
        if not path.is_file():
            return f"{path} is missing."
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} has {size} bytes, its manifest says {expected['bytes']}."
        if _crc32(path) != expected["crc32"]:
            return f"{path} is damaged: its checksum differs from the manifest's."
    return None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value

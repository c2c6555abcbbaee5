"""Libraries with device code, as the GPU kit finds them in wheels."""

import struct
from collections.abc import Sequence

from launch.device_code import ENTRY, FATBIN, MAGIC

HEADER = 64  # bytes of an entry's header in real libraries, and of ELF's headers
Code = tuple[int, int, bytes]  # kind, architecture, code


def fat_binary(codes: Sequence[Code]) -> bytes:
    body = b"".join(
        ENTRY.pack(kind, 0x101, HEADER, len(code), architecture).ljust(HEADER, b"\1") + code
        for kind, architecture, code in codes
    )
    return FATBIN.pack(MAGIC, 1, FATBIN.size, len(body)) + body


def library(section: bytes, content: bytes) -> bytes:
    """Return an ELF library that has one section beside that of the names."""
    names = b"\0" + section + b"\0.shstrtab\0"
    parts, headers, place = [], [bytes(HEADER)], HEADER
    for name, part in ((1, content), (2 + len(section), names)):
        headers.append(struct.pack("<I20xQQ", name, place, len(part)).ljust(HEADER, b"\0"))
        parts.append(part)
        place += len(part)
    start = bytearray(b"\x7fELF\2\1\1".ljust(HEADER, b"\0"))
    struct.pack_into("<Q", start, 0x28, place)
    struct.pack_into("<HHH", start, 0x3A, HEADER, len(headers), 2)
    return bytes(start) + b"".join(parts + headers)

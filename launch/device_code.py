"""Device code in CUDA shared libraries: keep that of one architecture.

A library holds its kernels once per architecture, in fat binaries (section `.nv_fatbin`): a header,
then entries, each a header with kind and architecture and, mostly compressed, the code. The driver
reads the headers and loads the best entry for its GPU. Zeros in the other entries' code change no
address, and take no space in an archive.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50  # fatbinary_section.h of CUDA: magic, version, bytes of header, of entries
FATBIN = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of header, of code; architecture
SASS = 2  # kind of machine code; 1 is PTX, which is compiled for a GPU without machine code


@dataclass
class Entry:
    """Code in a library. start, end: bytes of its code. architecture: 90 for sm_90 and sm_90a,
    which the code's own header tells apart.
    """

    kind: int
    architecture: int
    start: int
    end: int


def entries(library: bytes | bytearray) -> Iterator[Entry]:
    """Yield the device code of an ELF library, 64-bit and little-endian."""
    for offset, size in _sections(library):
        place, end = offset, offset + size
        while place + FATBIN.size <= end:
            magic, _, header, length = FATBIN.unpack_from(library, place)
            if magic != MAGIC:
                place += 8  # padding between fat binaries
                continue
            place += header
            stop = place + length
            while place < stop:
                kind, _, header, length, architecture = ENTRY.unpack_from(library, place)
                yield Entry(kind, architecture, place + header, place + header + length)
                place += header + length
            place = (stop + 7) // 8 * 8


def _sections(library: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the sections with device code."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<I20xQQ", library, table + i * size) for i in range(count)]
    strings = headers[names][1] if count else 0
    for name, offset, length in headers:
        text = library[strings + name : library.index(b"\0", strings + name)]
        if bytes(text) in SECTIONS:
            yield offset, length


def trim(library: bytearray, architecture: int) -> None:
    """Zero all device code but machine code of `architecture`.

    sm_90a, which Hopper kernels with wgmma are compiled for, has the number of sm_90.
    """
    for entry in list(entries(library)):
        if (entry.kind, entry.architecture) != (SASS, architecture):
            library[entry.start : entry.end] = bytes(entry.end - entry.start)

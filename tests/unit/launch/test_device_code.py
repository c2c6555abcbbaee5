import pytest

from launch.device_code import SASS, SECTIONS, Entry, entries, trim
from tests.unit.launch.libraries import Code, fat_binary, library

PTX = 1
CODES: list[Code] = [
    (SASS, 80, b"ampere" * 3),
    (SASS, 90, b"hopper" * 5),
    (PTX, 90, b"assembly" * 2),
    (SASS, 90, b"hopper with wgmma"),  # sm_90a has the number of sm_90
    (SASS, 100, b"blackwell"),
]


def codes(content: bytes, found: list[Entry]) -> list[Code]:
    return [(x.kind, x.architecture, content[x.start : x.end]) for x in found]


@pytest.mark.parametrize("section", SECTIONS)
def test_code_of_every_fat_binary_is_found(section: bytes) -> None:
    first, second = fat_binary(CODES[:2]), fat_binary(CODES[2:])
    padding = bytes(-len(first) % 8 + 16)  # fat binaries begin at multiples of 8
    content = library(section, first + padding + second)
    assert codes(content, list(entries(content))) == CODES


def test_all_code_but_one_architecture_s_is_zeroed_in_its_place() -> None:
    before = library(b".nv_fatbin", fat_binary(CODES))
    after = bytearray(before)
    trim(after, 90)
    assert list(entries(after)) == list(entries(before)) and len(after) == len(before)
    kept = [x if x[:2] == (SASS, 90) else (*x[:2], bytes(len(x[2]))) for x in CODES]
    assert codes(bytes(after), list(entries(after))) == kept
    gone = [x for x in entries(before) if (x.kind, x.architecture) != (SASS, 90)]
    changed = {index for index in range(len(before)) if before[index] != after[index]}
    assert changed == {index for x in gone for index in range(x.start, x.end)}


@pytest.mark.parametrize("section", [b".text", b".nv_fatbin_of_another"])
def test_a_library_without_device_code_is_unchanged(section: bytes) -> None:
    before = library(section, fat_binary(CODES))
    after = bytearray(before)
    trim(after, 90)
    assert after == before

"""Hostile and odd images: converted, or refused with a reason; never a crash."""

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from megavlm.config.data import IMAGE_FORMATS
from megavlm.data.media.image_decoding import decode, image_size
from tests.conftest import LFS_POINTER
from tests.support.samples import encode

NOISE = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)


def bomb(width: int, height: int) -> bytes:
    """A valid PNG of few bytes that declares a huge 1-bit image."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width // 8 + 1) * min(height, 1000)), 9)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_a_pointer_of_git_lfs_is_named() -> None:
    with pytest.raises(ValueError, match=r"a git-LFS pointer .* `git lfs pull`"):
        decode(LFS_POINTER)


def test_16_bit_greys_are_scaled_not_clipped() -> None:
    greys = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    decoded = np.asarray(decode(encode(Image.fromarray(greys))))[..., 0]
    assert np.abs(decoded - greys / 257).max() <= 1


def exif(orientation: int, odd: bytes = b"") -> bytes:
    """`odd`: eight bytes of text where XResolution should be a rational."""
    entries = [struct.pack("<HHIHxx", 0x0112, 3, 1, orientation)]
    if odd:
        entries.append(struct.pack("<HHII", 0x011A, 2, len(odd), 8 + 2 + 2 * 12 + 4))
    head = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries))
    return head + b"".join(entries) + bytes(4) + odd


@pytest.mark.parametrize("odd", [b"", b"72 dpi.\0"])
@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (0, NOISE),
        (1, NOISE),
        (2, NOISE[:, ::-1]),
        (3, NOISE[::-1, ::-1]),
        (4, NOISE[::-1]),
        (5, np.rot90(NOISE[::-1], 3)),
        (6, np.rot90(NOISE, 3)),
        (7, np.rot90(NOISE[::-1], 1)),
        (8, np.rot90(NOISE, 1)),
        (9, NOISE),
    ],
)
def test_exif_orientation_is_applied(
    orientation: int, turned: npt.NDArray[np.uint8], odd: bytes
) -> None:
    decoded = decode(encode(Image.fromarray(NOISE), exif=exif(orientation, odd)))
    assert np.array_equal(np.asarray(decoded), turned)


@pytest.mark.parametrize("key", ["exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"])
def test_metadata_in_a_png_s_text_costs_no_image(key: str) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text(key, "\nexif\n8\nno hex")
    assert np.array_equal(np.asarray(decode(encode(Image.fromarray(NOISE), pnginfo=text))), NOISE)


def test_text_that_pillow_takes_for_something_else_is_refused() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("transparency", "none")
    with pytest.raises(ValueError, match="the PNG image is broken"):
        decode(encode(Image.fromarray(NOISE).convert("L"), pnginfo=text))


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100)
@given(
    st.sampled_from(["JPEG", "PNG", "WEBP"]),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 255)), max_size=6),
    st.integers(8, 60),
)
def test_broken_exif_costs_no_image(
    format_: str, changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(exif(6, b"72 dpi.\0")[:length])
    for index, value in changes:
        damaged[6 + index % (len(damaged) - 6)] = value
    data = encode(Image.fromarray(NOISE), format_, exif=bytes(damaged))
    assert sorted(decode(data).size) == [20, 30]


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (30, 20), (index, 0, 0)) for index in range(200)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode(data)).max() == 0


@pytest.mark.parametrize("size", [(50_000, 50_000), (9_000, 9_000), (20_000, 5_000)])
def test_bombs_are_refused_from_their_header(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"larger than the limit of 67108864 pixels"):
        decode(bomb(*size))
    with pytest.raises(ValueError, match="larger than the limit"):
        image_size(bomb(*size))


def test_a_bomb_costs_no_memory() -> None:
    script = (
        "import resource, sys; from megavlm.data.media.image_decoding import decode\n"
        "data = sys.stdin.buffer.read()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "try: decode(data)\n"
        "except ValueError: print(peak() - before)\n"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", script], input=bomb(50_000, 50_000), capture_output=True, cwd=root
    )
    assert int(done.stdout) < 50 * 1024  # KiB


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
        encode(Image.fromarray(NOISE), "TIFF"),
        encode(Image.fromarray(NOISE), "JPEG")[:200],
        encode(Image.fromarray(NOISE), "PNG")[:500],
    ],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an image|broken"):
        decode(data)


def test_a_png_with_a_wrong_chunk_length_is_refused() -> None:
    data = bytearray(encode(Image.fromarray(NOISE)))
    length = data.index(b"IDAT") - 4
    data[length : length + 4] = struct.pack(">I", 100)
    with pytest.raises(ValueError, match="the PNG image is broken"):
        decode(bytes(data))


SAMPLES = [encode(Image.fromarray(NOISE), name) for name in IMAGE_FORMATS]


@settings(max_examples=100)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    st.integers(0, 2000),
)
def test_damage_is_decoded_or_refused(
    data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(data[: max(length, 1)])
    for index, value in changes:
        damaged[index % len(damaged)] = value
    try:
        assert decode(bytes(damaged)).mode == "RGB"
    except ValueError as error:
        assert str(error)

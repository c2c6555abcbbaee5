"""Pixels of odd images here, in SGLang's servers and in transformers, as docs/guides/data.md tells.

A run's own servers get the trainer's pixels. An exported model is shown files, which its server or
transformers decodes.
"""

import base64
import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from PIL import ExifTags, Image

from megavlm.data.media.image_decoding import decode
from tests.support.samples import encode

Pixels = npt.NDArray[np.uint8]

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (20, 30, 4), dtype=np.uint8)
RGBA = Image.fromarray(NOISE)
RGB, GREY = RGBA.convert("RGB"), RGBA.getchannel("R")
PALETTE = RGB.quantize(16)
BITS = GREY.point(lambda grey: 255 * (grey > 128), "1")
CMYK_JPEG = encode(RGB.convert("CMYK"), "JPEG")
FRAMES = [Image.fromarray(np.roll(NOISE, shift, 0)) for shift in range(3)]
ADOBE = b"\xff\xee\x00\x0e"  # the marker, after which 12 bytes follow


def png_of_16_bits(channels: int) -> bytes:
    """Pillow writes 16 bits of one channel only."""

    def chunk(name: bytes, data: bytes) -> bytes:
        sum_ = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + sum_

    values = RNG.integers(0, 2**16, (20, 30 * channels)).astype(">u2")
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", 30, 20, 16, colour_type, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in values))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def turned(format_: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encode(RGB, format_, exif=exif)


def animation(format_: str, **options: object) -> bytes:
    return encode(FRAMES[0], format_, save_all=True, append_images=FRAMES[1:], **options)


ALIKE = {
    **{f"rgb {name}": encode(RGB, name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    **{f"rgba {name}": encode(RGBA, name) for name in ("PNG", "WEBP", "BMP")},
    "rgba WEBP, lossless": encode(RGBA, "WEBP", lossless=True, exact=True),
    "rgb, a transparent colour": encode(RGB, transparency=RGB.getpixel((0, 0))),
    "grey PNG": encode(GREY),
    "grey JPEG": encode(GREY, "JPEG"),
    "grey with alpha": encode(Image.merge("LA", (GREY, RGBA.getchannel("A")))),
    "grey, a transparent grey": encode(GREY, transparency=GREY.getpixel((0, 0))),
    "palette": encode(PALETTE),
    "palette with alphas": encode(PALETTE, transparency=bytes(range(0, 256, 16))),
    "palette, a transparent colour": encode(PALETTE, transparency=3),
    "palette GIF, a transparent colour": encode(PALETTE, "GIF", transparency=3),
    "palette of 4 bits": encode(PALETTE, bits=4),
    "1 bit PNG": encode(BITS),
    "1 bit BMP": encode(BITS, "BMP"),
    "1 bit, black is transparent": encode(BITS, transparency=0),
    "cmyk, inverted as Adobe's": CMYK_JPEG,
    "cmyk": CMYK_JPEG.replace(CMYK_JPEG[CMYK_JPEG.index(ADOBE) :][:16], b"", 1),
    "16 bits of grey with alpha": png_of_16_bits(2),
    "16 bits of rgb": png_of_16_bits(3),
    "16 bits of rgba": png_of_16_bits(4),
    "animated GIF": animation("GIF"),
    "animated WEBP": animation("WEBP"),
    "animated PNG": animation("PNG"),
    "animated PNG with a picture before": animation("PNG", default_image=True),
    "one pixel": encode(RGB.crop((0, 0, 1, 1))),
    "one grey pixel, JPEG": encode(GREY.crop((0, 0, 1, 1)), "JPEG"),
    "one column": encode(RGB.crop((0, 0, 1, 20))),
}
TURNED = {
    f"EXIF {orientation} {name}": turned(name, orientation)
    for name in ("PNG", "JPEG", "WEBP")
    for orientation in range(2, 9)
}
GREY_16 = {"16 bits of grey": png_of_16_bits(1)}
FILES = ALIKE | TURNED | GREY_16

LOAD_IN_SGLANG = """
import base64, pathlib, sys
import numpy
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor as Processor
for file in pathlib.Path(sys.argv[1]).iterdir():
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    pixels = numpy.asarray(Processor._load_single_item(url, Modality.IMAGE))
    numpy.save(file.with_suffix(".npy"), pixels)
"""


def with_sglang(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.xdist_group("image_loaders")(test))


@pytest.fixture(scope="module")
def by_sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pixels]:
    """Pixels of each of FILES in a server of a Qwen-VL model."""
    folder = tmp_path_factory.mktemp("images")
    for number, file in enumerate(FILES.values()):
        (folder / f"{number}.image").write_bytes(file)
    subprocess.run([sys.executable, "-c", LOAD_IN_SGLANG, str(folder)], check=True)
    return {name: np.load(folder / f"{number}.npy") for number, name in enumerate(FILES)}


def by_transformers(file: bytes) -> Pixels:
    from transformers.image_utils import load_image

    return np.asarray(load_image("data:image/png;base64," + base64.b64encode(file).decode()))


def ours(file: bytes) -> Pixels:
    return np.asarray(decode(file))


def as_stored(file: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(file)))


def is_clipped(pixels: Pixels) -> bool:
    """Return True if nearly all of the greys in png_of_16_bits(1) have become white."""
    return bool((pixels == 255).mean() > 0.9)


@pytest.mark.parametrize("name", ALIKE | TURNED)
def test_transformers_sees_the_same_pixels(name: str) -> None:
    assert np.array_equal(by_transformers(FILES[name]), ours(FILES[name]))


@with_sglang
@pytest.mark.parametrize("name", ALIKE)
def test_sglang_sees_the_same_pixels(name: str, by_sglang: dict[str, Pixels]) -> None:
    assert np.array_equal(by_sglang[name], ours(FILES[name]))


@with_sglang
@pytest.mark.parametrize("name", TURNED)
def test_sglang_does_not_turn_images(name: str, by_sglang: dict[str, Pixels]) -> None:
    """Once it does, docs/guides/data.md has one thing less to tell."""
    assert np.array_equal(by_sglang[name], as_stored(FILES[name]))
    assert not np.array_equal(by_sglang[name], ours(FILES[name]))


@with_sglang
@pytest.mark.parametrize("name", GREY_16)
def test_others_clip_greys_of_16_bits(name: str, by_sglang: dict[str, Pixels]) -> None:
    """Once they do not, docs/guides/data.md has one thing less to tell."""
    assert is_clipped(by_sglang[name]) and is_clipped(by_transformers(FILES[name]))
    assert not is_clipped(ours(FILES[name]))

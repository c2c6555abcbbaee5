"""Decoding of untrusted images."""

import struct
import warnings
import zlib
from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError

from megavlm import git_lfs
from megavlm.config.data import IMAGE_FORMATS

MAX_PIXELS = 2**26  # 64 megapixels: 192 MiB as RGB

# Errors that Pillow raises for broken content. Its own errors are OSErrors. TypeError is raised for
# a PNG text whose name Pillow uses for something else.
_DECODE_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
)

_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # EXIF orientation -> transpose that turns the image upright


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image to RGB, rotated upright by its EXIF orientation. An animation yields its
    first frame.

    An orientation that cannot be read is ignored. Transparency is dropped, as in SGLang and
    transformers. 16-bit grey values are scaled to 8 bits, because Pillow would clip nearly
    all of them to white.

    Raises ValueError for bytes that are not an image in one of IMAGE_FORMATS, are truncated, or
    declare more than max_pixels. The size is checked before any pixel is decoded.
    """
    with _open(data, max_pixels) as image:
        try:
            image.load()
            turn = _turn(image)
            upright = image if turn is None else image.transpose(turn)
            if upright.mode.startswith("I"):
                upright = upright.convert("I").point(lambda grey: grey * (1 / 257)).convert("L")
            return upright.convert("RGB")
        except _DECODE_ERRORS as error:
            raise ValueError(f"the {image.format} image is broken ({error})") from error


def image_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (width, height) as stored, from the header only. Raises ValueError as `decode`
    does, except for errors in the pixels.
    """
    with _open(data, max_pixels) as image:
        return image.size


def _turn(image: Image.Image) -> Image.Transpose | None:
    # ImageOps.exif_transpose also rewrites the tags, and raises for malformed ones.
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except _DECODE_ERRORS:
        return None


def _open(data: bytes, max_pixels: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # max_pixels is lower than the limit at which Pillow warns.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:
        if git_lfs.is_pointer(data):
            raise ValueError(git_lfs.FETCH) from None
        raise ValueError(f"not an image in one of {', '.join(IMAGE_FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"larger than the limit of {max_pixels} pixels ({error})") from error
    except _DECODE_ERRORS as error:
        raise ValueError(f"the image is broken ({error})") from error
    if image.width * image.height > max_pixels:
        raise ValueError(
            f"{image.width} x {image.height} is larger than the limit of {max_pixels} pixels"
        )
    return image

"""Images from bytes that nobody vouches for."""

import struct
import warnings
import zlib
from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError

# What training data holds. Pillow's other formats are rarer than the flaws in their decoders.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26  # 64 megapixels: 192 MiB as RGB

# What Pillow raises for broken content, beside its own errors (all of them OSErrors). TypeError: a
# PNG's text, stored under a name that Pillow uses for something else.
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
}  # by EXIF's orientation


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image as RGB, turned upright as its EXIF orientation says; an animation's first frame.

    An orientation that cannot be read turns nothing. Transparency is dropped, as transformers'
    image processors drop it; 16-bit greys are scaled to 8 bits, where Pillow alone would clip
    nearly all of them to white.

    Raises ValueError, with the reason, for bytes that are no image in one of FORMATS, are cut
    short, or declare more than max_pixels; a size is refused before its pixels are decoded.
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
    """(width, height) as stored, read from the header alone; raises ValueError as `decode`."""
    with _open(data, max_pixels) as image:
        return image.size


def _turn(image: Image.Image) -> Image.Transpose | None:
    # ImageOps.exif_transpose also writes the tags anew, and raises for those that are odd.
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except _DECODE_ERRORS:
        return None


def _open(data: bytes, max_pixels: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Our limit is lower than the one that Pillow warns at.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"not an image in one of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"larger than the limit of {max_pixels} pixels ({error})") from error
    except _DECODE_ERRORS as error:
        raise ValueError(f"the image is broken ({error})") from error
    if image.width * image.height > max_pixels:
        raise ValueError(
            f"{image.width} x {image.height} is larger than the limit of {max_pixels} pixels"
        )
    return image
